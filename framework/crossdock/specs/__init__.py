"""Hook specifications of hook API 1, one module an extension point; the module's name is the point's name."""
