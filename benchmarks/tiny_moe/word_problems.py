"""Arithmetic word problems with worked answers: the third domain of the small model's training data.

Every problem is one document::

    Question: Ana has 12 shells. She finds 7 more. How many shells does Ana have now?
    Answer: Ana starts with 12 shells. 12 + 7 = 19. #### 19

Problems are drawn from the templates below with names, things and numbers from a seeded generator, so that the same
seed always gives the same problems.
"""

# ruff: noqa: SIM905  (lists of words read best as words)
import random
from collections.abc import Callable

PEOPLE = (
    "Ana Ben Carla David Emma Farid Grace Hugo Ines Jamal Kira Leo Maya Nils Olga Pedro Quinn Rosa Sami Tara "
    "Uma Victor Wei Xenia Yusuf Zoe Aiko Bruno Chloe Dario Elif Felix Gita Hana Ivan Julia Kofi Lena Mateo Nora"
).split()
THINGS = (
    "apples shells marbles stickers pencils books coins cards stamps beads pears plums buttons cookies muffins eggs "
    "ribbons bottles candles flowers tickets postcards balloons crayons notebooks oranges walnuts stones keys"
).split()
GOODS = "lamp jacket bicycle kettle chair radio backpack printer guitar camera blanket helmet tent scarf clock".split()
PLACES = "library bakery school farm museum garden market office harbour workshop station theatre".split()
CONTAINERS = "boxes bags baskets jars crates drawers shelves trays".split()
VEHICLES = "train bus car truck boat cyclist tram".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

Problem = tuple[str, str, int]  # question, steps, answer
Template = Callable[[random.Random], Problem]


def _gain(r: random.Random) -> Problem:
    who, thing, a, b = r.choice(PEOPLE), r.choice(THINGS), r.randint(2, 99), r.randint(2, 99)
    verb = r.choice(["finds", "buys", "collects", "is given", "wins"])
    question = f"{who} has {a} {thing}. {who} {verb} {b} more. How many {thing} does {who} have now?"
    return question, f"{who} starts with {a} {thing} and gets {b} more. {a} + {b} = {a + b}.", a + b


def _loss(r: random.Random) -> Problem:
    who, thing, b = r.choice(PEOPLE), r.choice(THINGS), r.randint(2, 60)
    a = b + r.randint(1, 60)
    verb = r.choice(["gives away", "loses", "sells", "uses"])
    question = f"{who} has {a} {thing} and {verb} {b} of them. How many {thing} are left?"
    return question, f"{who} had {a} {thing} and {verb} {b}. {a} - {b} = {a - b}.", a - b


def _gift(r: random.Random) -> Problem:
    (who, other), thing = r.sample(PEOPLE, 2), r.choice(THINGS)
    b, c = r.randint(2, 30), r.randint(2, 40)
    a = b + r.randint(1, 50)
    question = (
        f"{who} had {a} {thing}. {who} gave {b} to {other} and then bought {c} more. How many {thing} does {who} have?"
    )
    left = a - b
    return question, f"After the gift {who} has {a} - {b} = {left}. After buying: {left} + {c} = {left + c}.", left + c


def _packed(r: random.Random) -> Problem:
    who, thing, box = r.choice(PEOPLE), r.choice(THINGS), r.choice(CONTAINERS)
    a, b = r.randint(2, 12), r.randint(2, 20)
    question = f"{who} has {a} {box} with {b} {thing} in each. How many {thing} does {who} have in total?"
    return question, f"There are {a} {box} of {b} {thing}. {a} * {b} = {a * b}.", a * b


def _packed_extra(r: random.Random) -> Problem:
    place, thing, box = r.choice(PLACES), r.choice(THINGS), r.choice(CONTAINERS)
    a, b, c = r.randint(2, 12), r.randint(2, 15), r.randint(1, 40)
    question = f"The {place} keeps {thing} in {a} {box} of {b}, and {c} more on a table. How many {thing} are there?"
    return question, f"In the {box}: {a} * {b} = {a * b}. With the table: {a * b} + {c} = {a * b + c}.", a * b + c


def _shared(r: random.Random) -> Problem:
    who, thing, n, each = r.choice(PEOPLE), r.choice(THINGS), r.randint(2, 10), r.randint(2, 15)
    question = f"{who} shares {n * each} {thing} equally among {n} friends. How many {thing} does each friend get?"
    return question, f"{n * each} {thing} for {n} friends. {n * each} / {n} = {each}.", each


def _shared_rest(r: random.Random) -> Problem:
    who, thing, box = r.choice(PEOPLE), r.choice(THINGS), r.choice(CONTAINERS)
    n, each = r.randint(3, 10), r.randint(2, 12)
    rest = r.randint(1, n - 1)
    total = n * each + rest
    question = f"{who} puts {total} {thing} into {n} {box}, the same number in each. How many {thing} are left over?"
    return question, f"{n} * {each} = {n * each} fit into the {box}. {total} - {n * each} = {rest}.", rest


def _price(r: random.Random) -> Problem:
    who, thing, n, price = r.choice(PEOPLE), r.choice(THINGS), r.randint(2, 15), r.randint(2, 12)
    question = f"{who} buys {n} {thing} at {price} dollars each. How many dollars does {who} pay?"
    return question, f"{n} {thing} cost {n} * {price} = {n * price} dollars.", n * price


def _change(r: random.Random) -> Problem:
    who, thing, n, price = r.choice(PEOPLE), r.choice(THINGS), r.randint(2, 9), r.randint(2, 9)
    cost = n * price
    paid = r.choice([p for p in (10, 20, 50, 100) if p > cost])
    question = f"{who} buys {n} {thing} for {price} dollars each and pays with {paid} dollars. What is the change?"
    change = paid - cost
    return question, f"The {thing} cost {n} * {price} = {cost}. The change is {paid} - {cost} = {change}.", change


def _saving(r: random.Random) -> Problem:
    who, good, weekly, weeks = r.choice(PEOPLE), r.choice(GOODS), r.randint(3, 20), r.randint(2, 12)
    price = weekly * weeks
    question = (
        f"A {good} costs {price} dollars. {who} saves {weekly} dollars a week. After how many weeks can {who} buy it?"
    )
    return question, f"{who} needs {price} dollars. {price} / {weekly} = {weeks}.", weeks


def _discount(r: random.Random) -> Problem:
    good, percent, tens = r.choice(GOODS), r.choice([10, 20, 30, 40, 50]), r.randint(2, 20)
    price = tens * 10
    off = price * percent // 100
    question = f"A {good} costs {price} dollars. In the sale it is {percent} percent off. What is the sale price?"
    return question, f"{percent} percent of {price} is {off}. {price} - {off} = {price - off}.", price - off


def _travel(r: random.Random) -> Problem:
    vehicle, speed, hours = r.choice(VEHICLES), r.randint(4, 24) * 5, r.randint(2, 9)
    question = f"A {vehicle} travels at {speed} km per hour for {hours} hours. How many km does it travel?"
    return question, f"Distance is speed times time. {speed} * {hours} = {speed * hours}.", speed * hours


def _travel_time(r: random.Random) -> Problem:
    vehicle, speed, hours = r.choice(VEHICLES), r.randint(2, 20) * 5, r.randint(2, 9)
    distance = speed * hours
    question = f"A {vehicle} travels {distance} km at {speed} km per hour. How many hours does the trip take?"
    return question, f"Time is distance over speed. {distance} / {speed} = {hours}.", hours


def _ages(r: random.Random) -> Problem:
    (who, other), age, older, years = r.sample(PEOPLE, 2), r.randint(5, 40), r.randint(2, 20), r.randint(2, 15)
    question = (
        f"{who} is {age} years old. {other} is {older} years older than {who}. "
        f"How old will {other} be in {years} years?"
    )
    now = age + older
    then = now + years
    return question, f"{other} is {age} + {older} = {now} now. In {years} years: {now} + {years} = {then}.", then


def _times_as_many(r: random.Random) -> Problem:
    (who, other), thing, a = r.sample(PEOPLE, 2), r.choice(THINGS), r.randint(3, 30)
    word, k = r.choice([("twice", 2), ("three times", 3), ("four times", 4), ("five times", 5)])
    question = f"{who} has {a} {thing}. {other} has {word} as many. How many {thing} do they have together?"
    return question, f"{other} has {a} * {k} = {a * k}. Together: {a} + {a * k} = {a + a * k}.", a + a * k


def _three_days(r: random.Random) -> Problem:
    place, thing, (d, e, f) = r.choice(PLACES), r.choice(THINGS), r.sample(DAYS, 3)
    a, b, c = r.randint(5, 60), r.randint(5, 60), r.randint(5, 60)
    question = f"The {place} sold {a} {thing} on {d}, {b} on {e} and {c} on {f}. How many {thing} did it sell in all?"
    return question, f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.", a + b + c


def _difference(r: random.Random) -> Problem:
    (who, other), thing, b = r.sample(PEOPLE, 2), r.choice(THINGS), r.randint(3, 80)
    a = b + r.randint(1, 60)
    question = f"{who} has {a} {thing} and {other} has {b}. How many more {thing} does {who} have than {other}?"
    return question, f"The difference is {a} - {b} = {a - b}.", a - b


def _rows(r: random.Random) -> Problem:
    place, rows, seats = r.choice(PLACES), r.randint(3, 20), r.randint(3, 20)
    taken = r.randint(1, rows * seats - 1)
    question = f"The {place} has {rows} rows of {seats} chairs. {taken} chairs are taken. How many chairs are free?"
    total = rows * seats
    return question, f"There are {rows} * {seats} = {total} chairs. {total} - {taken} = {total - taken}.", total - taken


def _half(r: random.Random) -> Problem:
    who, thing, half, more = r.choice(PEOPLE), r.choice(THINGS), r.randint(3, 50), r.randint(1, 30)
    question = (
        f"{who} had {half * 2} {thing}. {who} sold half of them and then found {more} more. How many are there now?"
    )
    return question, f"Half of {half * 2} is {half}. {half} + {more} = {half + more}.", half + more


def _wages(r: random.Random) -> Problem:
    who, place = r.choice(PEOPLE), r.choice(PLACES)
    rate, hours, days = r.randint(5, 20), r.randint(2, 8), r.randint(2, 6)
    question = (
        f"{who} works at the {place} for {hours} hours a day and earns {rate} dollars an hour. "
        f"How much does {who} earn in {days} days?"
    )
    daily = rate * hours
    pay = daily * days
    return question, f"A day pays {rate} * {hours} = {daily}. {days} days pay {daily} * {days} = {pay}.", pay


def _pages(r: random.Random) -> Problem:
    who, a, days, left = r.choice(PEOPLE), r.randint(5, 30), r.randint(2, 9), r.randint(3, 90)
    total = a * days + left
    question = f"A book has {total} pages. {who} reads {a} pages a day for {days} days. How many pages remain?"
    return question, f"{who} reads {a} * {days} = {a * days} pages. {total} - {a * days} = {left}.", left


def _rectangle(r: random.Random) -> Problem:
    place, a, b = r.choice(PLACES), r.randint(3, 30), r.randint(3, 30)
    question = f"The floor of the {place} is {a} metres long and {b} metres wide. What is its perimeter in metres?"
    return question, f"{a} + {b} = {a + b}. 2 * {a + b} = {2 * (a + b)}.", 2 * (a + b)


def _two_goods(r: random.Random) -> Problem:
    who, (x, y), p, q = r.choice(PEOPLE), r.sample(GOODS, 2), r.randint(5, 90), r.randint(5, 90)
    paid = p + q + r.randint(1, 50)
    question = f"{who} has {paid} dollars and buys a {x} for {p} dollars and a {y} for {q} dollars. How much is left?"
    return question, f"Together they cost {p} + {q} = {p + q}. {paid} - {p + q} = {paid - p - q}.", paid - p - q


def _passengers(r: random.Random) -> Problem:
    vehicle, off, on = r.choice(["train", "bus", "tram", "boat"]), r.randint(2, 20), r.randint(2, 30)
    start = off + r.randint(1, 50)
    question = (
        f"A {vehicle} carries {start} people. At the {r.choice(PLACES)} {off} get off and {on} get on. "
        "How many are on it now?"
    )
    return question, f"{start} - {off} = {start - off}. {start - off} + {on} = {start - off + on}.", start - off + on


TEMPLATES: tuple[Template, ...] = (
    _gain, _loss, _gift, _packed, _packed_extra, _shared, _shared_rest, _price, _change, _saving, _discount, _travel,
    _travel_time, _ages, _times_as_many, _three_days, _difference, _rows, _half, _wages, _pages, _rectangle, _two_goods,
    _passengers,
)  # fmt: skip


def word_problems(count: int, seed: int) -> list[str]:
    """Return `count` different problems, as documents; the same ones for the same seed."""
    generator = random.Random(seed)
    documents: dict[str, None] = {}
    while len(documents) < count:
        question, steps, answer = generator.choice(TEMPLATES)(generator)
        documents[f"Question: {question}\nAnswer: {steps} #### {answer}"] = None
    return list(documents)
