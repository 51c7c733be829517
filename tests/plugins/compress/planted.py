"""Long documents that say one thing that is asked for, among many that are not: made from lists, the same every time.

What surrounds a fact is of its own kind: names, numbers, places and things happen in nearly every sentence, so no
sentence stands out by its form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from attrs import frozen

__all__ = ["NUM_SENTENCES", "PlantedDocument", "planted_documents"]

NUM_SENTENCES = 60
"""Sentences of a document."""


@frozen
class PlantedDocument:
    """A document, its fact, and a question about it in the document's words and in others."""

    text: str
    fact: str
    question: str
    reworded: str


_FACTS = (
    (
        "The ferry to Norrholm departs at 6:40 every weekday.",
        "When does the ferry to Norrholm depart on a weekday?",
        "At what time can commuters leave for the island by boat?",
    ),
    (
        "Dr. Imani Okafor discovered the beetle in a cellar in Trieste.",
        "Where did Dr. Imani Okafor discover the beetle?",
        "In which city was the insect first found?",
    ),
    (
        "The vault opens with the code 7731.",
        "Which code opens the vault?",
        "What number must be typed to unlock the strongroom?",
    ),
    (
        "The bakery's oven was bought secondhand from a monastery for 4,200 euros.",
        "From whom was the bakery's oven bought secondhand?",
        "How much money did the bread shop spend on its stove?",
    ),
    (
        "Goats on the farm are allergic to rhubarb leaves.",
        "What are the goats on the farm allergic to?",
        "Which plant makes the animals sick?",
    ),
    (
        "The festival was cancelled because the river flooded the main stage.",
        "Why was the festival cancelled?",
        "What kept the concerts from taking place?",
    ),
    (
        "Her grandfather built the violin from the wood of a pear tree.",
        "From which wood did her grandfather build the violin?",
        "What material is the musical instrument made of?",
    ),
    (
        "The pump must not be started before the red valve is closed.",
        "What must be closed before the pump is started?",
        "Which safety step comes first when somebody switches the machine on?",
    ),
    (
        "Flight 218 was diverted to Lisbon after a passenger fainted.",
        "Where was flight 218 diverted to?",
        "At which airport did the plane land instead?",
    ),
    (
        "The museum's oldest painting shows a shepherd with three dogs.",
        "What does the museum's oldest painting show?",
        "What can visitors see on the earliest picture of the gallery?",
    ),
    (
        "Professor Lindqvist retired in 1987 to keep bees on Gotland.",
        "When did Professor Lindqvist retire?",
        "In which year did the scholar stop working?",
    ),
    (
        "The medicine should be taken twice a day with milk.",
        "With what should the medicine be taken?",
        "How are patients supposed to swallow the drug?",
    ),
    (
        "Our cheapest subscription costs nine crowns a month.",
        "What does the cheapest subscription cost?",
        "How low is the price for those who want to become members?",
    ),
    (
        "The treaty was signed on board a fishing boat near Kotor.",
        "Where was the treaty signed?",
        "At what place did the two sides make peace?",
    ),
    (
        "A fox ate the last of the chickens on Sunday night.",
        "Who ate the last of the chickens?",
        "Which animal killed the hens?",
    ),
    (
        "Marlow's train to the coast leaves from platform nine.",
        "From which platform does Marlow's train leave?",
        "Where at the railway station does he have to wait?",
    ),
    (
        "The bridge can carry trucks of at most 12 tonnes.",
        "How many tonnes may trucks have that the bridge can carry?",
        "What is the weight limit for heavy vehicles that cross the river?",
    ),
    (
        "The password of the guest network is printed under the router.",
        "Where is the password of the guest network printed?",
        "How do visitors find out how to get onto the internet?",
    ),
    (
        "Anneke won the chess tournament by sacrificing her queen.",
        "How did Anneke win the chess tournament?",
        "Which move decided the final game?",
    ),
    (
        "The lighthouse has been painted green since the war.",
        "Which colour has the lighthouse been painted since the war?",
        "What does the tower on the shore look like?",
    ),
)

_NAMES = ("Mrs. Adeyemi", "Tomasz", "Ingrid Vale", "Mr. Castellano", "Yuki", "Old Pereira", "Captain Holm", "Zadie")
_PLACES = ("Ghent", "the harbour", "Tallinn", "the upper village", "Oporto", "the east wing", "Bergen", "the archive")
_THINGS = ("ledger", "lantern", "greenhouse", "piano", "weather station", "tapestry", "tractor", "clock tower")
_DAYS = ("Monday", "the second of May", "Thursday morning", "the day after", "midsummer", "Friday")

_FORMS = (
    "{name} moved to {place} in {year} and stayed for {small} years.",
    "The {thing} in {place} was repaired on {day} for {large} francs.",
    "Nobody in {place} remembered who had ordered the second {thing}.",
    "On {day}, {small} letters arrived from {place}, all of them unsigned.",
    "{name} counted {large} steps between {place} and the {thing}.",
    "According to {name}, the {thing} weighs about {large} kilograms.",
    "Rain fell on {place} for {small} days without a break.",
    "The council discussed the {thing} until {day} and decided nothing.",
    "{name} does not like to talk about the winter of {year}.",
    "A second {thing} stands in {place}, but it has not been used since {year}.",
    "If {name} had asked on {day}, the answer would have been no.",
    "The roof of {place} leaks in {small} corners whenever the wind turns.",
    "In {year} the price of bread rose by {small} percent within a week.",
    '"We never asked for a {thing}," said {name}, and closed the window.',
    "{name} keeps {small} photographs of {place} in a tin box.",
    "The road from {place} was widened in {year} and again {small} years later.",
    "Visitors to {place} usually stop at the {thing} and turn back before noon.",
    "Between {day} and the end of the month, {large} people walked past the {thing}.",
    "{name} wrote {small} pages about the {thing}, none of which was printed.",
    "The wallpaper in {place} shows herons, reeds and a very small moon.",
    "Each {thing} has a number, and number {large} is missing.",
    "It took {name} until {day} to find the way out of {place}.",
    "The school choir of {place} has {small} members and one conductor.",
    "A map from {year} shows {place} without its square.",
    "{name} sold the {thing} to a dealer from {place} and regretted it.",
    "The soup in {place} is served with {small} kinds of bread.",
    "On {day} the lamps were lit an hour later than usual.",
    "Only {small} of the {large} seats in {place} were taken.",
    "The wind blew the sign of the {thing} into the yard of {name}.",
    "{name} has studied the tides near {place} since {year}.",
)


def planted_documents() -> Iterator[PlantedDocument]:
    """Twenty documents, each with its fact somewhere else."""
    for number, (fact, question, reworded) in enumerate(_FACTS):
        drawn = random.Random(number)
        sentences = [_sentence(drawn) for _ in range(NUM_SENTENCES - 1)]
        sentences.insert(drawn.randrange(5, NUM_SENTENCES - 5), fact)
        paragraphs = [" ".join(sentences[start : start + 6]) for start in range(0, NUM_SENTENCES, 6)]
        yield PlantedDocument("\n\n".join(paragraphs), fact, question, reworded)


def _sentence(drawn: random.Random) -> str:
    filled = drawn.choice(_FORMS).format(
        name=drawn.choice(_NAMES),
        place=drawn.choice(_PLACES),
        thing=drawn.choice(_THINGS),
        day=drawn.choice(_DAYS),
        year=drawn.randrange(1890, 1990),
        small=drawn.randrange(2, 12),
        large=drawn.randrange(30, 900),
    )
    return filled[0].upper() + filled[1:]
