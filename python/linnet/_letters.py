"""Shapes in letters: what `B T H*normalize` is for given tensors, the same language as in C++.

A shape is a list of words; a word is a letter or an expression of letters and options with + - * // max(a,b). A letter takes
its value from the first tensor that shows it; a letter that no tensor shows comes from a rule. Sizes may be symbolic.
"""


def _max(a, b):
    if type(a) is int and type(b) is int:
        return max(a, b)
    import torch  # not above: the stubs are made where there may be no torch

    return torch.sym_max(a, b)


class Letters(dict):
    """The letters and options of one call; a letter that no tensor has shown is looked up in the rules."""

    def __init__(self, rules, options):
        super().__init__((name, int(value)) for name, value in options.items() if isinstance(value, int))
        self.update((name, len(value)) for name, value in options.items() if isinstance(value, (list, tuple)))
        self._rules = {
            rule["letter"]: next(
                (text for choice, text in rule["cases"] if rule["by"] is None or options[rule["by"]] == choice), None
            )
            for rule in rules
        }

    def __missing__(self, letter):
        expression = self._rules.get(letter)
        if expression is None:
            raise KeyError(letter)
        self[letter] = self.evaluate(expression)
        return self[letter]

    def evaluate(self, word):
        return eval(word, {"__builtins__": {}, "max": _max}, self)  # words come from the compiled library alone

    def knows(self, word):
        try:
            self.evaluate(word)
        except NameError:
            return False
        return True
