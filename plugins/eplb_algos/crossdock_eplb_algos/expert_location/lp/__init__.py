"""Every batch is split over replicas so that the fullest rank has as few tokens as possible."""
