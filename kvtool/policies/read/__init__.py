"""Readers: which of the stored tokens a decode step looks at, one a file."""
