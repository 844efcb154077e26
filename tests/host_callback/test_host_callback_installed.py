"""`host_callback.install()`: packages written for `jax.experimental.host_callback` run unedited."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from hostcallback import host_callback as hcb
from python_process import run_python

OLD_PACKAGE = {
    "__init__.py": """
from old_package.progress import with_progress
from old_package.debugging import debugged
""",
    "progress.py": '''
"""A progress bar, as packages had them in 2021."""
from jax import lax
from jax.experimental.host_callback import id_tap

def with_progress(body, every):
    def show(i, transforms):
        print(f"step {i}", flush=True)

    def tapped(i, x):
        lax.cond(i % every == 0, lambda _: id_tap(show, i), lambda _: i, operand=None)
        return body(i, x)

    return tapped
''',
    "debugging.py": """
import jax.experimental.host_callback
import jax.numpy as jnp
import numpy as np
from jax.experimental import host_callback as hcb

def debugged(x):
    hcb.id_print(x, what="x")
    y = jax.experimental.host_callback.call(lambda x: np.sin(x), x, result_shape=x)
    return hcb.id_tap(lambda value, transforms: print("y is", value, transforms), y * 0)

def wait():
    try:
        hcb.barrier_wait()
    except hcb.CallbackException as error:
        print("raised", error)
""",
}

PROGRAM = """
from hostcallback import host_callback
host_callback.install()
import jax, jax.numpy as jnp, old_package
import old_package.debugging

jax.jit(lambda x: jax.lax.fori_loop(0, 6, old_package.with_progress(lambda i, x: x + 1, 2), x))(0)
old_package.debugging.wait()
jax.jit(old_package.debugged)(jnp.float32(1))
old_package.debugging.wait()
"""

# Private names that the module of JAX 0.4.34 defined, and names of older versions that packages used.
INTERNALS = [
    "_CallbackHandlerData",
    "_CallbackWrapper",
    "_HOST_CALLBACK_INLINE",
    "_HOST_CALLBACK_LEGACY",
    "_HOST_CALLBACK_MAX_QUEUE_BYTE_SIZE",
    "_HOST_CALLBACK_OUTFEED",
    "_add_transform",
    "_aval_is_empty",
    "_call",
    "_callback_handler_data",
    "_callback_input_received",
    "_deprecated_barrier_wait",
    "_deprecated_call",
    "_deprecated_id_print",
    "_deprecated_id_tap",
    "_deprecated_stop_outfeed_receiver",
    "_deprecation_msg",
    "_deprecations",
    "_initialize_outfeed_receiver",
    "_instantiate_zeros",
    "_outside_call_abstract_eval",
    "_outside_call_batching_rule",
    "_outside_call_impl",
    "_outside_call_jvp_rule",
    "_outside_call_lowering",
    "_outside_call_outfeed_lowering",
    "_outside_call_run_callback",
    "_outside_call_translation_rule",
    "_outside_call_transpose_rule",
    "_print_tap_func",
    "_print_tap_lock",
    "_raise_if_using_outfeed_with_pjrt_c_api",
    "_register_callback",
    "_rewrite_closed_jaxpr",
    "_rewrite_eqn",
    "_rewrite_jaxpr",
    "_rewrite_while_outfeed_cond",
    "_use_outfeed",
    "_values_to_avals",
    "_with_sharding_proto",
    "DType",
    "XlaBuilder",
    "XlaDevice",
    "XlaLocalClient",
    "XlaOp",
    "XlaShape",
    "xops",
    "id_p",
    "outside_call_p",
    "id_tap_p",
    "id_tap_dep_p",
    "id_tap_dce_p",
    "outfeed_receiver",
    "_print_consumer",
    "_inline_host_callback",
    "_outfeed_receiver",
]
PUBLIC = [
    "CallbackException",
    "CallbackFlavor",
    "TapFunctionException",
    "barrier_wait",
    "call",
    "id_print",
    "id_tap",
    "logger",
    "stop_outfeed_receiver",
]


@pytest.fixture
def installed() -> Iterator[None]:
    hcb.install()
    yield
    hcb.uninstall()


def imported() -> Any:
    """The module that a package gets if it imports the old name, in any of the three ways."""
    names: dict[str, Any] = {}
    exec(
        "import jax.experimental.host_callback as a\n"
        "from jax.experimental import host_callback as b\n"
        "from jax.experimental.host_callback import id_tap as c",
        names,
    )
    assert names["a"] is names["b"]
    assert names["c"] is names["a"].id_tap
    return names["a"]


@pytest.mark.slow
def test_an_old_package_runs_unedited(tmp_path: Path) -> None:
    (tmp_path / "old_package").mkdir()
    for name, text in OLD_PACKAGE.items():
        (tmp_path / "old_package" / name).write_text(text)
    (tmp_path / "program.py").write_text(PROGRAM)  # its folder is where Python looks for packages first
    result = run_python("-W", "error", tmp_path / "program.py", timeout_sec=90, PYTHONSAFEPATH=None)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["step 0", "step 2", "step 4", "what: x", "1.", "y is 0.0 []"]


def test_the_old_name_is_the_drop_in_until_it_is_undone() -> None:
    hcb.install()
    hcb.install()
    assert imported() is hcb
    hcb.uninstall()
    with pytest.raises(ImportError):
        imported()
    assert not hasattr(jax.experimental, "host_callback")
    hcb.uninstall()
    hcb.install()
    assert imported() is hcb
    hcb.uninstall()


def test_another_packages_module_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = types.ModuleType("jax.experimental.host_callback")
    other.id_tap = None
    monkeypatch.setitem(sys.modules, "jax.experimental.host_callback", other)
    monkeypatch.setattr(jax.experimental, "host_callback", other, raising=False)
    hcb.install()
    assert imported() is hcb
    hcb.uninstall()
    assert imported() is other


def test_later_assignments_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    hcb.install()
    other: Any = types.ModuleType("jax.experimental.host_callback")
    other.id_tap = None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax.experimental.host_callback", other)
        patch.setattr(jax.experimental, "host_callback", other)
        hcb.uninstall()
        assert imported() is other
    hcb.install()
    hcb.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there(name: str) -> None:
    assert getattr(imported(), name) is getattr(hcb, name)


@pytest.mark.parametrize("name", INTERNALS)
def test_an_internal_of_the_outfeed_raises_its_replacement(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'.*outfeed.*In its place: .{{10}}") as caught:
        getattr(hcb, name)
    assert caught.value.name == name
    assert not hasattr(hcb, name)


@pytest.mark.usefixtures("installed")
def test_importing_an_internal_raises_the_same_text() -> None:
    with pytest.raises(ImportError, match=r"'id_tap_dep_p'.*In its place: taps are effects"):
        exec("from jax.experimental.host_callback import id_tap_dep_p", {})
    with pytest.raises(ImportError, match=r"'outside_call_p'.*an equation whose primitive is called 'tap'"):
        exec("from jax.experimental.host_callback import id_tap, outside_call_p", {})


def test_the_primitives_are_called_as_documented() -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(lambda arg, transforms: None, x)
        return hcb.call(lambda x: x, x, result_shape=x)

    names = [equation.primitive.name for equation in jax.make_jaxpr(f)(1.0).eqns]
    assert [name for name in names if name in ("tap", "host_call")] == ["tap", "host_call"]


def test_other_names_are_missing_as_from_any_module() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'hostcallback\.host_callback' has no attribute 'id_tab'"
    ):
        _ = hcb.id_tab
    with pytest.raises(ImportError, match="cannot import name 'id_tab'"):
        exec("from hostcallback.host_callback import id_tab", {})
