"""Sources of the two sandboxes of a dialogue: that of the program, and that of its tests.

In the sandbox of the tests, a stand-in takes the place of each name that the program defines. What
is done to it is asked for, as a request with plain values, and the program's sandbox answers. No
comparison is ever asked for, so `==` in a test is Python's own, between plain values.
"""

from __future__ import annotations

from roll.rewards.code.values import DECODE, ENCODE, MOST_ITEMS

PROGRAM = (
    ENCODE
    + DECODE
    + f"\nMOST_ITEMS = {MOST_ITEMS}\n"
    + """
import asyncio, builtins, contextlib, inspect, io, json, sys

def resolve(path):
    target = held[path[0]] if isinstance(path[0], int) else names[path[0]]
    for name in path[1:]:
        target = getattr(target, name)
    return target

def held_value(found):
    if found[0] != "held":
        raise KeyError(found[0])
    return resolve(found[1])

def hold(value):
    place = places.setdefault(id(value), len(held))
    if place == len(held):
        held.append(value)
    return ["held", [place]]

def tell_value(value):
    if inspect.iscoroutine(value):
        return ["coroutine", tell_value(asyncio.run(value))]
    return encode(value, 0, hold)

def kind_of(name):
    if name not in names:
        return {"kind": "missing"}
    value = names[name]
    if isinstance(value, type) and issubclass(value, Exception):
        return {"kind": "exception", "bases": [each.__name__ for each in value.__mro__]}
    if callable(value) or inspect.ismodule(value):
        return {"kind": "function"}
    return {"kind": "value", "value": tell_value(value)}

def do(asked):
    if asked["do"] == "kinds":
        return {"kinds": {name: kind_of(name) for name in asked["names"]}}
    if asked["do"] == "get":
        value = resolve(asked["path"])
        if callable(value):
            return {"callable": True}
        return {"value": tell_value(value)}
    arguments = decode(asked["arguments"], held_value)
    named = decode(asked["named"], held_value)
    if asked["do"] == "set":
        setattr(resolve(asked["path"]), asked["name"], arguments[0])
        return {"value": None}
    if asked["do"] == "isinstance":
        return {"value": isinstance(arguments[0], resolve(asked["path"]))}
    if asked["path"][-1] == "__iter__":
        value = list(_i.islice(iter(resolve(asked["path"][:-1])), MOST_ITEMS))
    else:
        value = resolve(asked["path"])(*arguments, **named)
    return {"value": tell_value(value), "after": [tell_value(arguments), tell_value(named)]}

def answer(asked):
    written = io.StringIO()
    try:
        with contextlib.redirect_stdout(written):
            told = do(asked)
    except Exception as error:
        told = {"raised": [[each.__name__ for each in type(error).__mro__], str(error)[:300]]}
    if written.getvalue():
        told["wrote"] = written.getvalue()[:100_000]
    return told

def tell(text, mark, out=sys.stdout, dump=json.dumps):
    out.write(f"\\n{mark}0:{dump(answer(json.loads(text)))}{mark}\\n")
    out.flush()

names, held, places = {"__name__": "candidate", "__builtins__": builtins}, [], {}
"""
)
"""Defines `tell`, which answers a request. The program runs in `names`."""

PROGRAM_ENDED = "ProgramEnded"
"""Name of the exception that the tests get where the program gives no answers any more."""

TESTS = (
    ENCODE
    + DECODE
    + """
import builtins, importlib.util, json, queue, sys, threading, types
asked, answered, judged, exceptions = queue.Queue(), queue.Queue(), [], {}
requests = 0

class ProgramEnded(BaseException): pass

def ask(request):
    global requests
    requests += request["do"] != "kinds"
    asked.put(request)
    answer = answered.get()
    if "wrote" in answer: sys.stdout.write(str(answer["wrote"]))
    if "ended" in answer: raise ProgramEnded("no answer")
    if "raised" in answer: raise exception_of(*answer["raised"])
    return answer

def is_usual(kind):
    # The others would end a loop of the tests, and the asserts behind it were not reached.
    ends_loops = (StopIteration, StopAsyncIteration)
    raised = isinstance(kind, type) and issubclass(kind, Exception)
    return raised and not issubclass(kind, ends_loops)

def exception_of(bases, text):
    for name in bases:
        kind = exceptions.get(name) or getattr(builtins, name, None)
        if is_usual(kind):
            try:
                return kind(text)
            except TypeError:
                continue
    return Exception(text)

async def ready(value):
    return value

def value_of(found, of_function=False):
    if found[0] == "held":
        return StandIn(found[1], of_function=of_function)
    if found[0] == "coroutine":
        return ready(decode(found[1], value_of))
    raise KeyError(found[0])

def stand_in(value):
    if type(value) is StandIn:
        return ["held", object.__getattribute__(value, "_path")]
    raise TypeError(f"{type(value).__name__} cannot be given to the program: no plain value")

def plain(value):
    return encode(value, 0, stand_in)

# Methods of Python's texts, sets and numbers that answer yes or no. A test that calls one on what a
# function returned means those types.
PREDICATES = {name for kind in (str, set, float) for name in dir(kind) if name[:2] == "is"}
PREDICATES |= {"startswith", "endswith"}

class StandIn:
    def __init__(self, path, derived=False, of_function=False):
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_derived", derived)
        object.__setattr__(self, "_of_function", of_function)

    def __getattr__(self, name):
        if name.startswith("__") or name in ("_path", "_derived", "_of_function"):
            raise AttributeError(name)
        if self._of_function and name in PREDICATES:
            raise AttributeError(f"{name}: an object of the program may say yes to anything")
        path = [*self._path, name]
        answer = ask({"do": "get", "path": path})
        return StandIn(path) if "callable" in answer else decode(answer["value"], value_of)

    def __setattr__(self, name, value):
        ask({"do": "set", "path": self._path, "name": name, "arguments": plain([value]),
             "named": plain({})})

    def __call__(self, *arguments, **named):
        return call(self._path, arguments, named)

    def __eq__(self, other):
        return type(other) is StandIn and self._path == other._path

    def __hash__(self):
        return hash(str(self._path))

    def __exit__(self, *_):
        call([*self._path, "__exit__"], (None, None, None), {})
        return False

    def __bool__(self):
        refuse_derived(self)
        for name in ("__bool__", "__len__"):
            try:
                return bool(call([*self._path, name], (), {}))
            except AttributeError:
                continue
        return True

    def __iter__(self):
        return iter(call([*self._path, "__iter__"], (), {}))

    def __instancecheck__(self, value):
        if type(value) is not StandIn:
            return False
        return ask({"do": "isinstance", "path": self._path, "arguments": plain([value]),
                    "named": plain({})})["value"] is True

def forward(name):
    return lambda self, *arguments: call([*self._path, name], arguments, {})

# A test that compares a number with a right one by an operator, as `abs(f(x) - 17) < 1e-6`, would
# tell it to an object of the program, which could answer 0. So no number ever comes of that.
def refuse_derived(value):
    if value is True or type(value) is StandIn and value._derived:
        raise TypeError("what an operator makes of an object of the program and of a plain value "
                        "is no number: the program would know the right one")

def operator(name):
    def apply(self, *others):
        value = call([*self._path, name], others, {})
        derived = self._derived or any(type(o) is not StandIn or o._derived for o in others)
        refuse_derived(derived and type(value) is not StandIn)
        return StandIn(value._path, derived=True) if derived else value
    return apply

def number(name):
    def apply(self):
        refuse_derived(self)
        return call([*self._path, name], (), {})
    return apply

for made, names in (
    (forward, "str repr enter getitem setitem delitem"),
    (operator, "add radd sub mul rmul truediv floordiv mod pow neg and or xor"),
    (number, "int float len"),
):
    for name in names.split():
        setattr(StandIn, f"__{name}__", made(f"__{name}__"))

def call(path, arguments, named):
    before = [plain(list(arguments)), plain(named)]
    answer = ask({"do": "call", "path": path, "arguments": before[0], "named": before[1]})
    after = answer.get("after", before)
    if after != before:
        now, now_named = (decode(each, value_of) for each in after)
        for mine, changed in [*zip(arguments, now), *((named[k], now_named[k]) for k in named)]:
            change(mine, changed)
    of_function = len(path) == 1 and str(path[0])[:1].islower()
    return decode(answer["value"], lambda found: value_of(found, of_function))

def change(mine, changed):
    if type(mine) in (list, bytearray):
        mine[:] = changed
    elif type(mine) in _DICTS or type(mine) is set:
        mine.clear()
        mine.update(changed)
    elif type(mine) is _c.deque:
        mine.clear()
        mine.extend(changed)

class Program(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return known(name)

def known(name):
    learn([name])
    return found_names[name]

def learn(wanted):
    global requests
    wanted = [name for name in wanted if name not in found_names]
    if wanted:
        for name, told in ask({"do": "kinds", "names": wanted})["kinds"].items():
            found_names[name] = made_of(name, told)
            requests += told["kind"] == "value"

found_names = {}

def made_of(name, told):
    if told["kind"] == "exception":
        bases = [getattr(builtins, each, None) for each in told["bases"][1:]]
        base = next(filter(is_usual, bases), Exception)
        exceptions[name] = type(name, (base,), {})
        return exceptions[name]
    if told["kind"] == "value":
        return decode(told["value"], value_of)
    return StandIn([name])

def run_solution(stdin=""):
    return ask({"do": "run", "stdin": str(stdin)})["value"]

def is_absent(name):
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except (ImportError, ValueError, OSError):
        return True

def prepare(names, modules):
    for name in modules:
        first = name.partition(".")[0]
        if is_absent(first) or type(sys.modules.get(first)) is Program:
            sys.modules[name] = module = Program(name)
            module.__path__, module.__all__ = [], list(names)
    learn(names)
    return {"__builtins__": builtins, "run_solution": run_solution, **found_names}

def run(judge, tests, names, modules, note):
    try:
        judge(tests, {**prepare(names, modules), note: judged}, judged)
        why = "" if requests or not judged else "the tests never asked the program"
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:300]
    asked.put({"judged": judged, "why": why})

def begin(judge, tests, names, modules, note, mark):
    arguments = (globals()[judge], tests, names, modules, note)
    threading.Thread(target=run, args=arguments, daemon=True).start()
    wait(mark)

def go_on(text, mark):
    answered.put(json.loads(text))
    wait(mark)

def wait(mark, out=sys.stdout):
    out.write(f"\\n{mark}0:{json.dumps(asked.get())}{mark}\\n")
    out.flush()

def plain_tests(tests, names, judged):
    names["__name__"] = "tests"
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), names)

def checking_program(tests, names, judged):
    names["__name__"] = "__main__"
    try:
        exec(compile(tests, "check.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    judged.append(requests > 0)
"""
)
"""Defines `begin`, which runs tests until their first request or their end, and `go_on`, which
answers a request."""

PYTEST = """
import pathlib, pytest

class Memory(pytest.Module):
    def _getobj(self):
        return self.config.tested

class Notes:
    def __init__(self, module, judged):
        self.module, self.judged, self.raised = module, judged, {}

    def pytest_configure(self, config):
        config.tested = self.module

    def pytest_collection(self, session):
        path = pathlib.Path(session.config.rootpath, "test_it.py")
        module = Memory.from_parent(session, path=path)
        session.items = list(session.genitems(module))
        session.testscollected = len(session.items)
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=session.items)
        return True

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None:
            wrong = call.excinfo.type is AssertionError
            told = f"{call.excinfo.type.__name__}: {call.excinfo.value}"[:300]
            self.raised[item.nodeid] = False if wrong else told

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.judged.append(self.raised.get(report.nodeid, "failed"))
        elif report.when == "call" and report.passed:
            self.judged.append(True)

def test_file(tests, names, judged):
    module = types.ModuleType("test_it")
    module.__file__ = "test_it.py"
    module.__dict__.update(names)
    exec(compile(tests, "test_it.py", "exec", dont_inherit=True), module.__dict__)
    off = ("cacheprovider", "faulthandler", "junitxml", "unraisableexception",
           "threadexception", "pastebin", "stepwise", "logging")
    flags = [flag for name in off for flag in ("-p", "no:" + name)]
    places = ["-c", "/dev/null", "--rootdir=/", "--capture=sys", "-q",
              "--disable-plugin-autoload"]
    code = pytest.main([*flags, *places], plugins=[Notes(module, judged)])
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with code {int(code)}")
"""
"""Defines `test_file`, which runs a pytest file that is no file."""
