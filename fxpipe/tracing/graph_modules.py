"""placeholder until merged"""


def by_function(*a):
    raise NotImplementedError


by_tracer = export = symbolic = by_function
