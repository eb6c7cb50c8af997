"""What becomes of evicted tokens: merged, or kept aside to calibrate by; one a file."""
