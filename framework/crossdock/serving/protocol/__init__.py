"""Bodies of the HTTP interface as attrs classes, decoded and described by msgspec."""
