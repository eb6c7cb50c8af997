"""Files that kvtool reads and writes: prompts, documents of results, none ever half written."""
