"""Texts, needles and questions: what samples are made of, and how they are cut to a length."""
