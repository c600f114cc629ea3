"""Every batch is split over replicas by what a rank's load and what its links cost."""
