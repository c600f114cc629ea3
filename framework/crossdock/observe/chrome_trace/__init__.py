"""Observer that writes steps and their timed operations as a Chrome trace, a file a rank."""
