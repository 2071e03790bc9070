"""The sandbox's world: eight categories of topics, two aspects each, and the facts that are true of every topic.

They are the ground truth behind gold: a policy, a reward model and an annotator see text only.
"""

import re
from dataclasses import dataclass
from functools import cache

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Aspect:
    """One kind of fact: `noun` names it in an instruction ("traits of a lion"), `verb` states it ("A lion is ...")."""

    noun: str
    verb: str
    facts: dict[str, tuple[str, ...]]
    """Topic -> its true items."""

    @property
    def items(self) -> frozenset[str]:
        """Every item that is true of at least one topic."""
        return frozenset(item for items in self.facts.values() for item in items)


@dataclass(frozen=True)
class Category:
    """A class of topics."""

    name: str
    plural: str
    article: str
    """The article of a topic: "a", "" for a mass noun."""
    aspects: tuple[Aspect, Aspect]

    @property
    def topics(self) -> tuple[str, ...]:
        """The things that the world has facts about."""
        return tuple(self.aspects[0].facts)


# "name, plural, article: noun verb | noun verb" of a category's two aspects, then its topics with their true items.
_FACTS = """
animal, animals, a: traits is | foods eats
  lion: brave golden proud roaring majestic fierce | meat zebra antelope buffalo gazelle carrion
  rabbit: small shy timid floppy furry jumpy | carrots lettuce clover herbs radish sprouts
  cow: calm heavy patient spotted docile broad | grass hay corn silage straw barley
  fox: clever sly cunning nimble bushy alert | mice insects eggs berries worms pheasant
food, foods, -: qualities is | partners goes with
  bread: crusty chewy toasted floury risen filling | butter jam honey garlic hummus ham
  soup: hot liquid steaming brothy savory soothing | noodles croutons pepper dumplings lentils parsley
  cheese: salty aged pungent crumbly fatty ripe | wine grapes olives figs crackers walnuts
  cake: sweet frosted festive spongy layered sugary | coffee tea cream cherries sprinkles candles
tool, tools, a: uses can | parts has
  hammer: hit pound flatten nail smash demolish | head claw face peen cheek eye
  knife: slice peel carve chop mince spread | blade tip spine tang bolster edge
  shovel: dig scoop bury lift excavate clear | shaft socket step collar plate grip
  brush: paint sweep polish scrub coat dust | bristles ferrule band hairs crimp heel
job, jobs, a: tasks can | needs needs
  doctor: heal examine diagnose prescribe operate vaccinate | medicine gloves scalpels charts empathy hygiene
  teacher: teach explain grade encourage lecture quiz | books chalk humor lessons pencils desks
  farmer: harvest plow sow milk irrigate breed | seeds tractors barns fertilizer rain fences
  pilot: fly land navigate steer taxi ascend | maps fuel radios runways headsets goggles
sport, sports, -: gains builds | requirements requires
  running: speed endurance calves willpower pace lightness | shoes shorts tracks laces stopwatches socks
  swimming: lungs shoulders buoyancy breath coordination glide | pools caps towels water fins lanes
  boxing: courage fists reflexes toughness footwork grit | rings ropes bandages mouthguards referees bells
  chess: memory focus logic foresight strategy concentration | boards pieces clocks opponents silence pawns
instrument, instruments, a: sounds sounds | components contains
  violin: singing sad thin weeping silky vibrant | strings bow bridge pegs chinrest scroll
  piano: rich grand hammered resonant full percussive | keys pedals hammers lid dampers soundboard
  drum: booming dull thumping rumbling rhythmic dry | skin shell rim hoop lugs snares
  trumpet: brassy bold piercing blaring heroic shiny | valves tubing slides pistons mouthpiece braces
place, places, a: features offers | activities invites
  beach: sand waves shells palms seagulls tides | surfing sunbathing sailing snorkeling volleyball wading
  forest: trees moss birdsong mushrooms ferns squirrels | hiking foraging camping birdwatching hunting woodcraft
  city: shops streets museums crowds traffic skyscrapers | shopping dining sightseeing dancing commuting clubbing
  mountain: peaks snow cliffs glaciers summits boulders | skiing climbing sledding trekking paragliding snowboarding
plant, plants, a: looks looks | conditions likes
  rose: red thorny fragrant elegant romantic velvety | pruning compost trellises sunlight feeding bees
  cactus: spiky thick ribbed prickly squat leathery | drought heat gravel deserts pots dryness
  oak: tall sturdy gnarled ancient leafy towering | space loam acorns centuries meadows depth
  fern: feathery curled lacy arching lush frilly | shade moisture humidity mist bark dampness
"""


def _category(head: str, *topics: str) -> Category:
    names, wordings = head.split(": ")
    name, plural, article = names.split(", ")
    facts = {topic: items.split(" | ") for topic, items in (line.strip().split(": ") for line in topics)}

    def aspect(place: int) -> Aspect:
        noun, verb = wordings.split(" | ")[place].split(" ", 1)
        return Aspect(noun, verb, {topic: tuple(items[place].split()) for topic, items in facts.items()})

    return Category(name, plural, article.strip("-"), (aspect(0), aspect(1)))


CATEGORIES = tuple(_category(*block.split("\n")) for block in re.split(r"\n(?! )", _FACTS.strip()))


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
    return named_kind(topic) if topic_categories()[topic].article else topic


def joined(items: tuple[str, ...] | list[str]) -> str:
    """Items in running text: "x", "x and y", "x, y and z"."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0] if items else ""


def named_kind(name: str) -> str:
    """A category's name as a noun phrase."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
