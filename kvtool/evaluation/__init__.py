"""Compare policies: tasks, their scores, and runs that can be broken off and resumed."""
