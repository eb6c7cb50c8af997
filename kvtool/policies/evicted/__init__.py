"""Uses of evicted tokens: merged, or kept aside for calibration; one a file."""
