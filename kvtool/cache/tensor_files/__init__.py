"""Files of tensors under a checksum, and the numbers per head that a profile writes to one."""
