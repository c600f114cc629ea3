"""What the core tells about itself while it runs."""
