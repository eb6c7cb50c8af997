"""Speed and memory against DynamicCache; not collected by pytest."""
