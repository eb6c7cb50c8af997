"""From a budget or a plan to numbers of tokens: what is stored, and what a step reads."""
