"""`lightrft` is a namespace that four distributions share."""


def test_namespace_has_no_init_in_any_member(repository):
    assert not list(repository.glob("packages/*/src/lightrft/__init__.py"))
