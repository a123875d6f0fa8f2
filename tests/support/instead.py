"""An object with some of its attributes replaced."""


class Instead:
    """Forwards all attributes to an object, except the given ones."""

    def __init__(self, of, **instead):
        self._of = of
        self.__dict__.update(instead)

    def __getattr__(self, name):
        return getattr(self._of, name)
