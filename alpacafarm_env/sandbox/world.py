"""The sandbox's world: eight categories of topics, two aspects each, and the facts that are true of every topic.

The facts are plain English nouns, verbs and adjectives so that instructions and responses read naturally. They are the
private ground truth behind the gold reward: a policy, a reward model and an annotator see text only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Aspect:
    """One kind of fact about the topics of a category.

    `noun` names the facts in an instruction ("traits of a lion"), `verb` states them in a sentence ("A lion is ...").
    """

    noun: str
    verb: str
    facts: dict[str, tuple[str, ...]]
    """Topic -> its true items."""

    @property
    def items(self) -> frozenset[str]:
        """Every item that is true of at least one topic of the category."""
        return frozenset(item for items in self.facts.values() for item in items)


@dataclass(frozen=True)
class Category:
    """A class of topics: its name ("animal"), its plural, and two aspects."""

    name: str
    plural: str
    article: str
    """What stands before a topic: "a", "" for a mass noun."""
    aspects: tuple[Aspect, Aspect]

    @property
    def topics(self) -> tuple[str, ...]:
        """The things of this class that the world has facts about."""
        return tuple(self.aspects[0].facts)


def _aspect(noun: str, verb: str, table: str) -> Aspect:
    """Reads "topic: item item ..." lines; each line states what is true of one topic."""
    rows = (line.split(":") for line in table.strip().splitlines())
    return Aspect(noun, verb, {topic.strip(): tuple(items.split()) for topic, items in rows})


CATEGORIES: tuple[Category, ...] = (
    Category(
        "animal",
        "animals",
        "a",
        (
            _aspect(
                "traits",
                "is",
                """
            lion: brave golden proud roaring majestic fierce
            rabbit: small shy timid floppy furry jumpy
            cow: calm heavy patient spotted docile broad
            fox: clever sly cunning nimble bushy alert
        """,
            ),
            _aspect(
                "foods",
                "eats",
                """
            lion: meat zebra antelope buffalo gazelle carrion
            rabbit: carrots lettuce clover herbs radish sprouts
            cow: grass hay corn silage straw barley
            fox: mice insects eggs berries worms pheasant
        """,
            ),
        ),
    ),
    Category(
        "food",
        "foods",
        "",
        (
            _aspect(
                "qualities",
                "is",
                """
            bread: crusty chewy toasted floury risen filling
            soup: hot liquid steaming brothy savory soothing
            cheese: salty aged pungent crumbly fatty ripe
            cake: sweet frosted festive spongy layered sugary
        """,
            ),
            _aspect(
                "partners",
                "goes with",
                """
            bread: butter jam honey garlic hummus ham
            soup: noodles croutons pepper dumplings lentils parsley
            cheese: wine grapes olives figs crackers walnuts
            cake: coffee tea cream cherries sprinkles candles
        """,
            ),
        ),
    ),
    Category(
        "tool",
        "tools",
        "a",
        (
            _aspect(
                "uses",
                "can",
                """
            hammer: hit pound flatten nail smash demolish
            knife: slice peel carve chop mince spread
            shovel: dig scoop bury lift excavate clear
            brush: paint sweep polish scrub coat dust
        """,
            ),
            _aspect(
                "parts",
                "has",
                """
            hammer: head claw face peen cheek eye
            knife: blade tip spine tang bolster edge
            shovel: shaft socket step collar plate grip
            brush: bristles ferrule band hairs crimp heel
        """,
            ),
        ),
    ),
    Category(
        "job",
        "jobs",
        "a",
        (
            _aspect(
                "tasks",
                "can",
                """
            doctor: heal examine diagnose prescribe operate vaccinate
            teacher: teach explain grade encourage lecture quiz
            farmer: harvest plow sow milk irrigate breed
            pilot: fly land navigate steer taxi ascend
        """,
            ),
            _aspect(
                "needs",
                "needs",
                """
            doctor: medicine gloves scalpels charts empathy hygiene
            teacher: books chalk humor lessons pencils desks
            farmer: seeds tractors barns fertilizer rain fences
            pilot: maps fuel radios runways headsets goggles
        """,
            ),
        ),
    ),
    Category(
        "sport",
        "sports",
        "",
        (
            _aspect(
                "gains",
                "builds",
                """
            running: speed endurance calves willpower pace lightness
            swimming: lungs shoulders buoyancy breath coordination glide
            boxing: courage fists reflexes toughness footwork grit
            chess: memory focus logic foresight strategy concentration
        """,
            ),
            _aspect(
                "requirements",
                "requires",
                """
            running: shoes shorts tracks laces stopwatches socks
            swimming: pools caps towels water fins lanes
            boxing: rings ropes bandages mouthguards referees bells
            chess: boards pieces clocks opponents silence pawns
        """,
            ),
        ),
    ),
    Category(
        "instrument",
        "instruments",
        "a",
        (
            _aspect(
                "sounds",
                "sounds",
                """
            violin: singing sad thin weeping silky vibrant
            piano: rich grand hammered resonant full percussive
            drum: booming dull thumping rumbling rhythmic dry
            trumpet: brassy bold piercing blaring heroic shiny
        """,
            ),
            _aspect(
                "components",
                "contains",
                """
            violin: strings bow bridge pegs chinrest scroll
            piano: keys pedals hammers lid dampers soundboard
            drum: skin shell rim hoop lugs snares
            trumpet: valves tubing slides pistons mouthpiece braces
        """,
            ),
        ),
    ),
    Category(
        "place",
        "places",
        "a",
        (
            _aspect(
                "features",
                "offers",
                """
            beach: sand waves shells palms seagulls tides
            forest: trees moss birdsong mushrooms ferns squirrels
            city: shops streets museums crowds traffic skyscrapers
            mountain: peaks snow cliffs glaciers summits boulders
        """,
            ),
            _aspect(
                "activities",
                "invites",
                """
            beach: surfing sunbathing sailing snorkeling volleyball wading
            forest: hiking foraging camping birdwatching hunting woodcraft
            city: shopping dining sightseeing dancing commuting clubbing
            mountain: skiing climbing sledding trekking paragliding snowboarding
        """,
            ),
        ),
    ),
    Category(
        "plant",
        "plants",
        "a",
        (
            _aspect(
                "looks",
                "looks",
                """
            rose: red thorny fragrant elegant romantic velvety
            cactus: spiky thick ribbed prickly squat leathery
            oak: tall sturdy gnarled ancient leafy towering
            fern: feathery curled lacy arching lush frilly
        """,
            ),
            _aspect(
                "conditions",
                "likes",
                """
            rose: pruning compost trellises sunlight feeding bees
            cactus: drought heat gravel deserts pots dryness
            oak: space loam acorns centuries meadows depth
            fern: shade moisture humidity mist bark dampness
        """,
            ),
        ),
    ),
)


@cache
def topic_categories() -> dict[str, Category]:
    """Topic -> its category."""
    return {topic: category for category in CATEGORIES for topic in category.topics}


@cache
def claim_words() -> frozenset[str]:
    """Every word that claims something in a response: items, topics and category names, singular and plural."""
    words = {item for category in CATEGORIES for aspect in category.aspects for item in aspect.items}
    names = {name for category in CATEGORIES for name in (category.name, category.plural)}
    return frozenset(words | names | set(topic_categories()))


def named(topic: str) -> str:
    """The topic as a noun phrase: "a lion", "an oak", "soup"."""
    if not topic_categories()[topic].article:
        return topic
    return f"an {topic}" if topic[0] in "aeiou" else f"a {topic}"


def joined(items: tuple[str, ...] | list[str]) -> str:
    """Items in running text: "x", "x and y", "x, y and z"."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0] if items else ""


def named_kind(name: str) -> str:
    """A category's name as a noun phrase: "an animal", "a tool"."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
