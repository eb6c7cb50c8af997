"""Choose slots together by their scores, where it is not one by one."""
