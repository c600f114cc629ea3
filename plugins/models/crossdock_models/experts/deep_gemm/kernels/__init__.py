"""What stands between received rows and DeepGEMM's two products."""
