"""Always the sum of the counts, no padding beyond attention TP."""
