"""The prompts that the companions of SmolLM2 are trained and judged on: templates filled with topics.

All of it was written for this repository and is under its licence. Of each list of topics one in ten is kept
for prompts that nothing is trained on, so that those are about other things and not only put in other words.
The kinds ask for replies of very different lengths. Knows nothing of models.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

NUM_TRAINED, NUM_HELD_OUT = 4200, 200
_ONE_IN, _KEPT = 10, 7  # of each list of topics, index 7, 17, ... is held out


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its kind, what it is about, and its text."""

    kind: str
    topic: str
    text: str


def _topics(text: str) -> list[str]:
    return [topic.strip() for topic in text.replace("\n", "").split("|")]


_THINGS = _topics(
    """photosynthesis|the water cycle|black holes|the French Revolution|volcanoes|vaccines|inflation|
    compound interest|gravity|the human heart|honeybees|coral reefs|the printing press|solar panels|
    earthquakes|the Roman Empire|evolution|electric cars|the moon|blood types|democracy|
    supply and demand|the internet|batteries|rainbows|antibiotics|the Silk Road|whales|plate tectonics|
    glaciers|the stock market|penguins|magnets|the immune system|steam engines|recycling|the alphabet|
    chess|the Olympic Games|sleep|vitamins|tides|the Great Wall of China|owls|fossils|lightning|
    radio waves|yeast|the nervous system|deserts|bridges|compasses|insurance|credit scores|
    the periodic table|atoms|enzymes|octopuses|the Renaissance|lenses|glass|paper|concrete|
    the Amazon rainforest|wind turbines|satellites|the ozone layer|bacteria|mushrooms|the piano|jazz|
    watercolour painting|haiku|myths|the metric system|time zones|leap years|maps|submarines|kites|
    clocks|the Sahara|spices|coffee|chocolate|tea|olive oil|rice farming|cheese|salt|sugar|silk|cotton|
    leather|gold|copper|diamonds|sand dunes|caves|rivers|islands|forests|wetlands|spiders|ants|
    butterflies|wolves|elephants|sharks|parrots|tortoises|dolphins|camels|bats|frogs"""
)
_ABOUT_THINGS = {
    "short fact": (
        "What is the simplest way to describe {x}? One sentence.",
        "Give me one surprising fact about {x}.",
        "Name three things that come to mind with {x}.",
        "In at most ten words: {x}.",
    ),
    "question": (
        "Why do people care about {x}?",
        "How would you introduce {x} to someone who has never heard of it?",
        "What are common misunderstandings about {x}?",
        "What should I know about {x}?",
        "How might {x} look in a hundred years?",
    ),
    "explain": (
        "Explain {x} to a ten-year-old.",
        "Explain {x} in detail, step by step.",
        "Explain {x} in two short paragraphs.",
        "Explain {x} in one paragraph of about fifty words.",
    ),
    "list": (
        "List five facts about {x}.",
        "Give me ten quiz questions about {x}, with their answers.",
        "What are the advantages and disadvantages of {x}? Use bullet points.",
    ),
    "essay": (
        "Write an essay of several paragraphs about {x} and its place in our lives.",
        "Write a blog post about {x} with a title and an introduction.",
    ),
    "poem": ("Write a four-line poem about {x}.", "Write a haiku about {x}."),
    "title": (
        "Suggest a title for an article about {x}. Reply with the title only.",
        "Give one word that describes {x}.",
    ),
    "plan": ("Plan a forty-minute school lesson about {x}.",),
    "dialogue": ("Write a short dialogue in which two friends talk about {x}.",),
}
_TASKS = _topics(
    """bake bread|change a bicycle tyre|learn to swim|start a vegetable garden|clean a coffee machine|
    write a CV|prepare for a job interview|save money each month|train for a five-kilometre run|
    make a paper boat|paint a wall|pack for a weekend trip|choose a laptop|look after a cat|
    learn to type faster|cook rice|organise a bookshelf|plan a birthday party|set up a home office|
    fall asleep more easily|take better photographs|repair a leaking tap|make a budget|
    learn a new language|study for an exam|give a short speech|write a thank-you note|
    wash a wool jumper|grow tomatoes on a balcony|teach a dog to sit|knit a scarf|build a birdhouse|
    find a flat|remember names|read a map|make a salad dressing|sharpen a knife|remove a stain|
    plan a hike|feed a family cheaply|start a blog|learn the guitar|stretch after running|
    store potatoes|back up files|choose a password|cut down on sugar|wrap a present|light a campfire|
    draw a face|play table tennis|sort family photographs|clean windows|host a book club|make jam|
    move to another town|ride a horse|write down a family recipe|set a table|ask for a pay rise"""
)
_ABOUT_TASKS = {
    "how to": (
        "How do I {x}?",
        "Give me a step-by-step guide to {x}.",
        "What mistakes do beginners make when they {x}?",
        "I have one hour to {x}. What should I do first?",
    ),
    "tips": (
        "Give me three tips to {x}.",
        "What do I need before I {x}? A short list is enough.",
        "One sentence of advice for somebody who wants to {x}, please.",
    ),
    "schedule": ("Make a plan for four weeks in which I {x}. Use a table or a list by day.",),
}
_CHARACTERS = _topics(
    """a lighthouse keeper|a young inventor|a talking fox|a retired astronaut|two sisters|a shy dragon|
    a baker|a lost robot|a sailor|a clockmaker|a street musician|a librarian|a curious mouse|
    a mountain guide|an old gardener|a night nurse|a chess player|a painter|a bus driver|a beekeeper"""
)
_PLACES = _topics(
    """in a snowed-in village|on a small island|in a library at night|at the edge of a desert|
    in a flying city|on a train|under the sea|in an old theatre|at a county fair|on the moon|
    in a forest of giant trees|in a quiet harbour|in a museum after closing|on a rooftop|
    in a valley without wind"""
)
_PROGRAMS = _topics(
    """reverses a string|checks whether a number is prime|counts the words in a text|
    finds the largest number in a list|sorts a list of names|converts Celsius to Fahrenheit|
    removes duplicates from a list|computes the factorial of a number|checks for a palindrome|
    merges two sorted lists|sums the digits of a number|finds the median of a list|
    counts the vowels in a word|prints a multiplication table|generates a random password|
    reads a file line by line|computes Fibonacci numbers|finds the longest word in a sentence|
    rotates a list by one place|computes the average of a column in a CSV file|
    checks whether brackets are balanced|converts a number to binary|groups words by their first letter|
    computes the distance between two points|validates an email address|flattens a nested list|
    finds common elements of two lists|counts the days between two dates|shuffles a deck of cards|
    rounds prices to two digits"""
)
_REASONS = _topics(
    """ask for a day off|apologise for a late delivery|invite people to a meeting on Friday|
    thank a colleague for help|complain about a broken kettle|ask for a refund|accept a job offer|
    decline an invitation|remind someone of a deadline|introduce a new team member|
    ask for directions to the office|cancel a subscription|report a lost parcel|
    congratulate a friend on an exam|ask a neighbour to water plants|move an appointment to next week|
    request a quote for printing|announce a charity run|ask a teacher for feedback|
    say goodbye before leaving a job"""
)
_SENTENCES = _topics(
    """The shop opens at nine o'clock.|I lost my umbrella on the bus yesterday.|
    My brother plays the drums every evening.|We would like a table for four, please.|
    The museum is closed on Mondays.|It rained so hard that the match was called off.|
    Can you tell me where the station is?|She has been learning to sail since spring.|
    This soup needs a little more salt.|The children built a castle out of sand.|
    He forgot to lock the back door.|Our train leaves from platform six.|
    I would rather stay at home tonight.|The new bridge saves us half an hour.|
    They have lived here for twenty years.|Please send the report before lunch.|
    The dog barked at the postman again.|We missed the last ferry.|There is a spider in the bath.|
    You can borrow my bicycle if you like."""
)
_ABOUT_SENTENCES = {
    "translate": tuple(f"Translate into {x}: {{x}}" for x in ("French", "Spanish", "German", "Italian")),
    "rewrite": (
        "Rewrite this sentence so that it sounds more formal: {x}",
        "Say this in another way: {x}",
        "Turn this sentence into a question: {x}",
        "Continue the text with three more sentences: {x}",
        "Is this sentence about the past, the present or the future? One word. {x}",
    ),
}
_NAMES = (
    "Ada",
    "Bruno",
    "Chiara",
    "Dmitri",
    "Elif",
    "Farah",
    "Goran",
    "Hana",
    "Ivo",
    "Jasmin",
    "Kofi",
    "Lena",
)
_DEEDS = _topics(
    """opened a small repair shop for radios|walked across the island in nine days|
    painted the town hall blue|found an old map in a drawer|taught forty people to juggle|
    planted a row of cherry trees|wrote letters to every school|built a raft out of barrels|
    sold the family farm|counted birds for a whole winter|started a choir|restored a fishing boat|
    cooked soup for the whole street|collected stories from older neighbours|
    mapped the footpaths of the valley|ran a cinema in a barn"""
)
_ENDINGS = (
    "At first hardly anyone noticed, and money was short.",
    "Some neighbours helped, others thought it was a waste of time.",
    "The local paper printed a page about it in June.",
    "A storm in autumn nearly ended everything.",
    "Two years later people still talk about it.",
    "Today a small sign at the market square reminds visitors of what happened.",
)
_KINDS_OF = (
    ("a whale", "a fish"),
    ("a tomato", "a fruit"),
    ("Paris", "the capital of Italy"),
    ("ice", "lighter than water"),
    ("a spider", "an insect"),
    ("the sun", "a star"),
    ("gold", "a metal"),
    ("a violin", "a string instrument"),
    ("a bat", "a bird"),
    ("2", "a prime number"),
    ("Mount Everest", "in Africa"),
    ("milk", "made by plants"),
    ("Mars", "farther from the sun than Earth"),
    ("iron", "magnetic"),
    ("a square", "a rectangle"),
    ("Australia", "an island"),
    ("oxygen", "a gas"),
    ("Shakespeare", "a painter"),
    ("a mushroom", "a plant"),
    ("the Nile", "a river"),
    ("a penguin", "able to fly"),
    ("glass", "made from sand"),
    ("a lion", "a herbivore"),
    ("water", "an element"),
    ("an octopus", "a mammal"),
    ("copper", "a good conductor"),
    ("Venus", "larger than Earth"),
    ("Tokyo", "in Japan"),
    ("a banana", "yellow when ripe"),
    ("poker", "a card game"),
)


def train_prompts(count: int = NUM_TRAINED) -> list[Prompt]:
    """Prompts to train on, all different, in an order that never changes.

    Args:
      count: how many, at most as many as there are.

    Raises:
      ValueError: more than there are.
    """
    return _chosen(count, held_out=False)


def held_out_prompts(count: int = NUM_HELD_OUT) -> list[Prompt]:
    """Prompts about topics that none of `train_prompts` is about; otherwise as there."""
    return _chosen(count, held_out=True)


def _chosen(count: int, held_out: bool) -> list[Prompt]:
    found = {prompt.text: prompt for prompt in _all(held_out)}
    if not 1 <= count <= len(found):
        raise ValueError(f"count is {count}, allowed is 1 ... {len(found)}")
    # By a digest: the same on every machine and version, and of all kinds alike from the beginning.
    key = lambda prompt: hashlib.sha256(prompt.text.encode("utf-8")).digest()
    return sorted(found.values(), key=key)[:count]


def _split(topics: Sequence[str], held_out: bool) -> list[str]:
    return [topic for index, topic in enumerate(topics) if (index % _ONE_IN == _KEPT) == held_out]


def _all(held_out: bool) -> Iterator[Prompt]:
    for topics, kinds in ((_THINGS, _ABOUT_THINGS), (_TASKS, _ABOUT_TASKS), (_SENTENCES, _ABOUT_SENTENCES)):
        for topic in _split(topics, held_out):
            for kind, templates in kinds.items():
                yield from (Prompt(kind, topic, template.format(x=topic)) for template in templates)
    for who in _split(_CHARACTERS, held_out):
        for where in _PLACES:
            yield Prompt("story", who, f"Write a short story about {who} {where}.")
        yield Prompt("story", who, f"Describe {who} in one sentence.")
        yield Prompt("story", who, f"Write the first paragraph of a novel about {who}.")
    for program in _split(_PROGRAMS, held_out):
        for language in ("Python", "JavaScript", "C"):
            yield Prompt("code", program, f"Write a {language} function that {program}.")
        yield Prompt("code", program, f"Explain how a program that {program} works, then show one in Python.")
        yield Prompt("code", program, f"Suggest a name for a function that {program}. Reply with the name.")
    for reason in _split(_REASONS, held_out):
        for tone in ("a polite", "a short", "a friendly", "a formal"):
            yield Prompt("email", reason, f"Write {tone} email to {reason}.")
        yield Prompt("email", reason, f"Give me only the subject line of an email to {reason}.")
    for deed in _split(_DEEDS, held_out):
        yield from _summaries(deed)
    for first, second in _pairs(held_out):
        topic = f"{first} and {second}"
        yield Prompt("arithmetic", topic, f"What is {first} + {second}?")
        yield Prompt("arithmetic", topic, f"Work out {first} times {second} step by step.")
        yield Prompt(
            "arithmetic", topic, f"Which is larger, {first} or {second}? Answer with the number only."
        )
        words = f"Lena has {first} stamps and gets {second} more. How many has she then?"
        yield Prompt("arithmetic", topic, words)
    for index, (thing, other) in enumerate(_KINDS_OF):
        if (index % _ONE_IN == _KEPT) == held_out:
            yield Prompt("yes or no", thing, f"Is {thing} {other}? Answer yes or no.")
            yield Prompt("yes or no", thing, f"Is {thing} {other}? Give your reasons.")
            yield Prompt("yes or no", thing, f'True or false: "{thing[0].upper()}{thing[1:]} is {other}."')


def _summaries(deed: str) -> Iterator[Prompt]:
    for place, name in enumerate(_NAMES):
        told = [_ENDINGS[(place + step) % len(_ENDINGS)] for step in range(2 + place % 3)]
        text = " ".join([f"In the spring {name} {deed}.", *told])
        if place % 2:
            yield Prompt("summarise", deed, f"Summarise in one sentence: {text}")
        else:
            yield Prompt("summarise", deed, f"What happens in this text, and why might it matter? {text}")


def _pairs(held_out: bool) -> Iterator[tuple[int, int]]:
    for index in range(120):
        if (index % _ONE_IN == _KEPT) == held_out:
            yield 11 + 7 * index % 89 + index, 3 + 5 * index % 37
