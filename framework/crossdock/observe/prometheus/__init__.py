"""Observer that keeps a Prometheus text file a rank, for a collector that reads files; the server's /metrics needs no observer."""
