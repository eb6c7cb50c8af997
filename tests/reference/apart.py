"""Heads of a layer that have budgets of their own, each with a policy to itself."""

from .policies import Reference


class Apart(Reference):
    """A policy of its own for each head; nothing leaves while the text fits the mean of them.

    Args:
        make: a budget -> the policy of one head.
        budgets: of each head.
    """

    def __init__(self, make, budgets):
        mean = sum(budgets) // len(budgets)
        super().__init__(mean)
        self.own = [make(budget) for budget in budgets]
        self.even = [make(mean) for _ in budgets]
        self.prompt_only = self.own[0].prompt_only
        self.fits = True

    def observe(self, attention):
        for policy in (*self.own, *self.even):
            policy.observe(attention)

    def __getattr__(self, name):
        if name not in ("look", "ask") or not hasattr(self.own[0], name):
            raise AttributeError(name)

        def show(*given):
            for policy in (*self.own, *self.even):
                getattr(policy, name)(*given)

        return show

    def keep(self, head, positions, values):
        if self.in_prompt and positions[-1] >= self.budget:
            self.fits = False
        policy = (self.even if self.fits else self.own)[head]
        return policy.keep(head, positions, values)

    def forget(self, head, kept):
        for policy in (self.own[head], self.even[head]):
            policy.forget(head, kept)
