"""Values and protocols shared by the core and every plugin; torch appears in annotations only."""
