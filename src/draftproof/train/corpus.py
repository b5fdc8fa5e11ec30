"""Prompts to train on, built from what is installed: code, docstrings and documentation of permissively licensed
packages, and questions from lists of words.

    python -m draftproof.train.corpus prompts --num-prompts 12000

writes train.jsonl and held_out.jsonl, each line with its domain: code, chat or prose. The two share no source file and
no topic. The prompts depend on the installed versions, so `sources.json` beside them lists these with their licences.
The packages that the demo's prompts were taken from are left out.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

# Licence of each package; modules of the standard library are under Python's own.
SOURCES = {
    "numpy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "tokenizers": "Apache-2.0",
    "safetensors": "Apache-2.0",
    "huggingface_hub": "Apache-2.0",
    "click": "BSD-3-Clause",
    "rich": "MIT",
    "jinja2": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "fsspec": "BSD-3-Clause",
    "pip": "MIT",
    # the following are used only if they happen to be installed
    "aiohttp": "Apache-2.0",
    "alembic": "MIT",
    "anyio": "MIT",
    "boto3": "Apache-2.0",
    "botocore": "Apache-2.0",
    "cyclopts": "Apache-2.0",
    "dash": "MIT",
    "datasets": "Apache-2.0",
    "faker": "MIT",
    "flask": "BSD-3-Clause",
    "fontTools": "MIT",
    "httpx": "BSD-3-Clause",
    "joblib": "BSD-3-Clause",
    "jsonschema": "MIT",
    "matplotlib": "matplotlib (as Python's)",
    "more_itertools": "MIT",
    "mpmath": "BSD-3-Clause",
    "mypy": "MIT",
    "narwhals": "MIT",
    "nltk": "Apache-2.0",
    "openai": "Apache-2.0",
    "optuna": "MIT",
    "pandas": "BSD-3-Clause",
    "plotly": "MIT",
    "pyarrow": "Apache-2.0",
    "pydantic": "MIT",
    "pygments": "BSD-2-Clause",
    "pyparsing": "MIT",
    "requests": "Apache-2.0",
    "sanic": "MIT",
    "seaborn": "BSD-3-Clause",
    "setuptools": "MIT",
    "sklearn": "BSD-3-Clause",
    "speculators": "Apache-2.0",
    "starlette": "BSD-3-Clause",
    "textual": "MIT",
    "typer": "MIT",
    "urllib3": "MIT",
    "uvicorn": "BSD-3-Clause",
    "virtualenv": "MIT",
    "websockets": "BSD-3-Clause",
    "werkzeug": "BSD-3-Clause",
}
STANDARD_LIBRARY = "standard library"
DEMO_PACKAGES = ("keras", "scipy", "torchtitan", "twisted", "sympy", "fastapi", "sqlalchemy", "pytest")
SHARES = {
    "completion": 0.34,
    "function": 0.16,
    "explain": 0.08,
    "question": 0.18,
    "sums": 0.12,
    "prose": 0.12,
}
DOMAINS = {
    "completion": "code", "function": "code", "explain": "code", "question": "chat", "sums": "chat", "prose": "prose",
}  # fmt: skip
HELD_OUT = 20  # one file or topic in 20 is held out
MOST_FILES = 1000  # per package
MOST_BYTES = 120_000  # per file
LEAST_LENGTH = 400

TOPICS = """photosynthesis; the water cycle; black holes; the French Revolution; compound interest; recursion; bread
baking; jazz music; the immune system; plate tectonics; chess openings; the Roman Empire; solar panels; coffee; tides;
the Great Wall of China; vaccines; inflation; haiku; volcanoes; the stock market; gravity; sourdough; marathon
training; the printing press; coral reefs; antibiotics; supply and demand; the Moon; electric cars; penguins; origami;
DNA; the Silk Road; earthquakes; public speaking; gardening; time zones; the Renaissance; magnets; yoga; budgeting;
glaciers; bees; the Internet; a good night's sleep; rainbows; job interviews; cheese; the human heart; recycling;
camping; lasers; the Olympic Games; vitamins; deserts; teamwork; clouds; the Industrial Revolution; owls; passwords;
learning a language; rivers; the violin; nuclear energy; honesty; spiders; moving to a new city; batteries; elephants;
democracy; bicycles; the periodic table; tea; lightning; procrastination; sharks; the brain; pottery; hurricanes;
friendship; trains; algae; the Pyramids; photography; saving money; dinosaurs; meditation; bridges; the scientific
method; a healthy breakfast; whales; libraries; databases; sorting algorithms; version control; unit tests; operating
systems; machine learning; neural networks; hash tables; regular expressions; web servers; encryption; object-oriented
programming; compilers; allergies; anger; ants; apples; archaeology; architecture; artificial intelligence; asthma;
autumn; babysitting; ballet; bats; beavers; birthdays; blockchain; board games; bonsai trees; book clubs; butterflies;
cacti; calculus; calligraphy; car insurance; carbon dioxide; cats; chemistry; child care; chocolate; cities in the
future; climate; college applications; comets; comic books; community service; concrete; cooking rice; courage;
creativity; credit cards; cricket; criticism; crosswords; curiosity; dancing; data privacy; dogs; dreams; driving
tests; drones; drums; dust; eclipses; economics; emotions; English grammar; essays; ethics; evolution; exams;
exercise; eyesight; fables; failure; family traditions; farming; fashion; fire; first aid; fishing; flags; floods;
folk tales; football; forests; fractions; freedom of speech; frogs; fruit; furniture; galaxies; genetics; ghosts;
giraffes; glass; globalisation; goals for the new year; gold; gratitude; guitars; habits; handwriting; happiness;
headaches; hiking; history; holidays; homework; horses; hospitals; houseplants; humour; hunger; ice cream; icebergs;
immigration; inventions; islands; jealousy; jellyfish; journalism; jungles; kindness; kites; knitting; lakes; laundry;
law; leadership; leap years; lemons; letters; lighthouses; lions; loneliness; long-distance running; luck; mammals;
maps; markets; marriage; Mars; mathematics; measuring; memory; metals; mice; microscopes; milk; mirrors; mobile
phones; money; monkeys; mountains; mushrooms; music theory; mythology; names; newspapers; night; noise; novels;
nutrition; oceans; octopuses; office work; oil; online shopping; opera; oranges; orchestras; owning a pet; painting;
pandas; paper; parenting; parks; patience; peace; physics; pianos; pigeons; pirates; pizza; plastics; poetry;
politics; pollution; potatoes; poverty; presentations; prime numbers; probability; puzzles; quantum physics; rabbits;
radio; rain; reading; refrigerators; relativity; renewable energy; restaurants; retirement; rice; robots; rockets;
rugby; running a small business; salt; sand; satellites; Saturn; sculpture; seasons; seeds; self-driving cars; ships;
shoes; shyness; silk; skiing; sleep; smell; snakes; snow; soap; social media; soil; sound; soup; spices; spring;
stars; statistics; steel; stress; students; submarines; sugar; summer; the Sun; surfing; swimming; taxes; teachers;
teeth; telephones; telescopes; television; tennis; the Amazon; the Arctic; the atom; the bicycle; the calendar; the
desert; the eye; the liver; the Middle Ages; the sea; the speed of light; the theatre; the zoo; time management;
tomatoes; tourism; toys; traffic; translation; travel by train; trees; trust; turtles; twins; typing; umbrellas;
unemployment; universities; urban planning; vegetables; video games; villages; vocabulary; volunteering; voting;
walking; war; wasps; waste; watches; water; weather forecasts; weddings; weekends; wheat; wind; wine; winter; wolves;
wood; work from home; World War I; writing; zebras; zero; binary search; caching; command lines; continuous
integration; data structures; debugging; dependency injection; functional programming; garbage collection; graph
theory; integers in computers; JSON; linked lists; memory management; microservices; multithreading; network
protocols; pointers; Python decorators; Python dictionaries; Python generators; race conditions; REST interfaces;
software licences; SQL joins; static typing; strings in Python; text editors; Unicode; virtual machines; web browsers"""
QUESTIONS = """What is the most important thing to know about {t}?; Explain {t} to a ten-year-old.; Give me five facts
about {t}.; Write a short story about {t}.; What are common misconceptions about {t}?; How would you describe {t} in
one paragraph?; Write an email to a friend about {t}.; List the pros and cons of {t}.; Write a poem about {t}.; Why
does {t} matter?; Compare {t} with {u}.; What should a beginner read about {t}, and in which order?; Write a short
dialogue between two people who disagree about {t}.; How did people's view of {t} change over time?; Give a
step-by-step introduction to {t}.; What questions would an expert ask about {t}?; Summarise what you know about {t} in
three bullet points.; How are {t} and {u} related?; Write a news report that mentions {t} and {u}.; Make a quiz with
four questions about {t}, with answers.; What is {t}?; Tell me something surprising about {t}.; I know nothing about
{t}. Where do I start?; How do I explain {t} to my grandmother?; Write a tweet about {t}.; Write a blog post about
{t}.; Give me a list of ten words that have to do with {t}.; What are the advantages of {t}?; What could go wrong with
{t}?; Can you help me with a school essay about {t}?; Write the first paragraph of an essay about {t}.; Write a short
speech about {t}.; Who should know about {t}, and why?; Describe {t} without using its name.; Write a recipe, a joke
and a riddle about {t}.; What is the difference between {t} and {u}?; Which is more important, {t} or {u}?; Write a
story in which {t} and {u} play a part.; Give three examples of {t} in everyday life.; Hi! I want to learn about {t}.;
Translate "I like {t}" into French, Spanish and German.; Make a plan for a week of learning about {t}.; Define {t} in
one sentence.; Correct the grammar: "me and him was talk about {t} yesterday".; Write a product description that has
to do with {t}.; Write a letter of complaint about {t}.; How has technology changed {t}?; Make a table of facts about
{t} and {u}.; Imagine that you are an expert on {t}. Introduce yourself.; Suggest a title for a book about {t}."""
NAMES = [
    "Maya",
    "Tom",
    "Priya",
    "Lucas",
    "Hannah",
    "Omar",
    "Sofia",
    "Ben",
    "Aiko",
    "Carlos",
    "Nadia",
    "Peter",
    "Ruth",
    "Ivan",
    "Grace",
    "Leo",
]
THINGS = [
    "apples",
    "pencils",
    "books",
    "cards",
    "stickers",
    "marbles",
    "tickets",
    "coins",
    "eggs",
    "flowers",
    "cookies",
    "bottles",
    "shells",
    "stamps",
]
SUMS = """{a} has {x} {n}. {b} has {k} times as many {n} as {a}. How many {n} do they have together?; A shop sells {n}
for ${k} each. {a} buys {x} of them and pays with a ${y} note. How much change does {a} get?; {a} collects {x} {n}
every day for {k} days and then gives {z} of them to {b}. How many {n} are left?; {a} packs {y} {n} into boxes of {k}.
How many boxes are full, and how many {n} are left over?; {a} reads {x} pages on Monday and twice as many on Tuesday.
The book has {y} pages. How many pages are left?; {a} and {b} share {y} {n} so that {a} gets {k} more than {b}. How
many does {b} get?; A train travels {x} miles in {k} hours. How far does it travel in {z} hours at the same speed?;
{a} earns ${x} an hour and works {k} hours a day, {z} days a week. How much does {a} earn in a week?; {a} bakes {x}
cakes and cuts each into {k} slices. {b} eats {z} slices. How many slices are left?; A garden is {x} meters long and
{k} meters wide. What are its area and its perimeter?; {a} had some {n}, gave {k} to {b}, then bought {z} more and now
has {y}. How many {n} did {a} have at first?; What is {k} percent of {y}?; {a}'s class has {x} students. Each of them
needs {k} {n}. {n} come in packs of {z}. How many packs must {a} buy?; {a} is {k} years older than {b}. In {z} years,
the sum of their ages will be {y}. How old is {b} now?; A tank holds {y} liters. {a} fills it at {k} liters a minute,
and it loses 1 liter a minute. How many minutes does it take to fill it?; {a} has ${y}. {a} spends half of it on {n}
and then ${x} on lunch. How much money is left?; Every week, {a} saves ${x} and {b} saves ${k} more than that. How
much have they saved together after {z} weeks?; {a} sells {n} at ${k} apiece. On Friday {a} sold {x}, and on Saturday
{z} more than on Friday. How much did {a} earn on both days?; A recipe for {k} people needs {z} {n}. How many {n} does
{a} need for {x} people?; {a} walks {k} miles on every weekday and {z} miles on each day of the weekend. How many
miles is that in {k} weeks?; {b} bought {x} {n} for ${y}. {a} bought {z} more {n} than {b} at the same price. How much
did {a} pay?; {a} had {y} {n}. A third of them broke, and {x} of the others were sold. How many are left?; A bus with
{x} seats makes {k} trips a day. On average, {z} seats are empty. How many people does it carry in a day?; {a} reads
{x} pages an hour and {b} reads {k} pages an hour more. Both read for {z} hours. How many pages do they read in all?;
A phone costs ${y}. {a} pays ${x} at once and the rest in {k} equal payments. How much is each payment?; {a} planted
{x} rows of {k} {n}. {z} percent of them did not grow. How many grew?; It takes {a} {x} minutes to do a task and {b}
twice as long. How many minutes do {k} tasks take each of them?"""
ASKS = (
    "Write a Python function `{name}({arguments})`. {what}",
    "In Python, how can I do the following? {what}",
)
EXPLAINS = (
    "Explain what this function does.",
    "Write a docstring for this function.",
    "Write a test for this function.",
    "What could go wrong in this code?",
)
PROSE = (
    "Summarize the following text.",
    "Rewrite the following text so that a beginner understands it.",
    "Continue the following text.",
    "Write three questions that the following text answers.",
)


@dataclass(frozen=True)
class Source:
    """A source file of a package. `name`: its path, beginning with the package."""

    name: str
    path: Path

    @functools.cached_property
    def text(self) -> str:
        """The file's text; "" if it is short, or not ASCII, which small models handle badly."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        return text if len(text) > LEAST_LENGTH and text.isascii() else ""

    @functools.cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError):
            return ast.parse("")

    @property
    def is_held_out(self) -> bool:
        return _is_held_out(self.name)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--num-prompts", type=click.IntRange(min=20), default=12000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def command(folder: Path, num_prompts: int, seed: int) -> None:
    """Write prompts into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = build(num_prompts, seed)
    for name, held in (("train", False), ("held_out", True)):
        lines = [json.dumps(_line(p)) for p in prompts if p["held_out"] is held]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        click.echo(f"{folder / f'{name}.jsonl'}: {len(lines)} prompts")
    (folder / "sources.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")


def build(num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """The prompts, shuffled; the same ones for the same seed and installation."""
    rng = random.Random(seed)
    sources = [s for package in (*SOURCES, STANDARD_LIBRARY) for s in files(package)]
    makers: dict[str, Callable[[], dict[str, Any] | None]] = {
        "completion": lambda: _completion(rng, rng.choice(sources)),
        "function": lambda: _function(rng, rng.choice(sources)),
        "explain": lambda: _explain(rng, rng.choice(sources)),
        "question": lambda: _question(rng),
        "sums": lambda: _sum(rng),
        "prose": lambda: _prose(rng, rng.choice(sources)),
    }
    prompts: dict[str, dict[str, Any]] = {}
    for kind, share in SHARES.items():
        wanted = len(prompts) + round(num_prompts * share)
        for _ in range(20 * wanted):  # unsuitable sources and duplicates are skipped
            made = makers[kind]()
            if made is not None:
                about = {"id": f"{kind}-{len(prompts)}", "domain": DOMAINS[kind]}
                prompts.setdefault(json.dumps(made), {**about, **made})
            if len(prompts) == wanted:
                break
    listed = list(prompts.values())
    rng.shuffle(listed)
    return listed


def versions() -> dict[str, dict[str, str]]:
    """Version and licence of each package that prompts are made from."""
    distributions = importlib.metadata.packages_distributions()
    found = {
        name: {"version": importlib.metadata.version(distributions[name][0]), "licence": licence}
        for name, licence in SOURCES.items()
        if importlib.util.find_spec(name) is not None
    }
    return {**found, STANDARD_LIBRARY: {"version": sysconfig.get_python_version(), "licence": "PSF-2.0"}}


def files(package: str) -> Iterator[Source]:
    """A package's source files without vendored ones; at most `MOST_FILES`, chosen by the hashes of their names."""
    root = _root(package)
    if root is None:
        return
    paths = [p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts)]
    paths.sort(key=lambda path: _digest(str(path.relative_to(root))))
    for path in paths[:MOST_FILES]:
        if LEAST_LENGTH < path.stat().st_size < MOST_BYTES:
            yield Source(f"{root.name}/{path.relative_to(root)}", path)


_SKIPPED = frozenset({"_vendor", "site-packages", "test", "idlelib", "lib2to3", "turtledemo", "encodings"})


def _root(package: str) -> Path | None:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _completion(rng: random.Random, source: Source) -> dict[str, Any] | None:
    """The beginning of a file, or a piece from its middle, to be continued."""
    lines = source.text.splitlines()
    while lines and lines[0].startswith("#"):
        lines.pop(0)
    num_lines = rng.randint(8, 40)
    first = 0 if rng.random() < 0.5 else rng.randrange(max(1, len(lines) - num_lines))
    text = "\n".join(lines[first : first + num_lines])[:1600].strip("\n")
    if len(text) < 120:
        return None
    return {"prompt": f"# {source.name}\n{text}\n", "held_out": source.is_held_out}


def _function(rng: random.Random, source: Source) -> dict[str, Any] | None:
    node = _documented(rng, source)
    if node is None:
        return None
    what = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    ask = rng.choice(ASKS).format(name=node.name, arguments=ast.unparse(node.args), what=what)
    return _message(ask, source) if 30 < len(what) < 500 else None


def _explain(rng: random.Random, source: Source) -> dict[str, Any] | None:
    node = _documented(rng, source)
    code = None if node is None else ast.get_source_segment(source.text, node)
    if code is None or not 150 < len(code) < 1500:
        return None
    return _message(f"{rng.choice(EXPLAINS)}\n\n```python\n{textwrap.dedent(code)}\n```", source)


def _prose(rng: random.Random, source: Source) -> dict[str, Any] | None:
    """A task about a longer docstring."""
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    texts = [d for n in nodes if (d := ast.get_docstring(n)) and 300 < len(d) < 2500]
    return _message(f"{rng.choice(PROSE)}\n\n{rng.choice(texts)[:1400]}", source) if texts else None


def _documented(rng: random.Random, source: Source) -> ast.FunctionDef | None:
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
    return rng.choice(nodes) if nodes else None


def _question(rng: random.Random) -> dict[str, Any]:
    topic, other = rng.sample(_items(TOPICS), 2)
    text = rng.choice(_items(QUESTIONS)).format(t=topic, u=other)
    return {"messages": _user(text), "held_out": _is_held_out(topic)}


def _sum(rng: random.Random) -> dict[str, Any]:
    """A word problem in arithmetic; the result need not be a whole number."""
    form = rng.choice(_items(SUMS))
    one, two = rng.sample(NAMES, 2)
    numbers = {
        "x": rng.randint(6, 60),
        "k": rng.randint(2, 9),
        "y": rng.randint(80, 900),
        "z": rng.randint(3, 12),
    }
    text = form.format(a=one, b=two, n=rng.choice(THINGS), **numbers)
    return {"messages": _user(text), "held_out": _is_held_out(text)}


def _message(text: str, source: Source) -> dict[str, Any]:
    return {"messages": _user(text), "held_out": source.is_held_out}


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";")]


def _is_held_out(name: str) -> bool:
    return _digest(name) % HELD_OUT == 0


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _line(prompt: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in prompt.items() if key != "held_out"}


if __name__ == "__main__":
    command()
