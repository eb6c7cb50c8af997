"""How slots are chosen by their scores, where it is not one by one."""
