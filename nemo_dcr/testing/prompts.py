"""The small built-in prompt set that the trainer and the demo learn from and serve.

Each entry is a question and a short answer; the trainer makes one text of both. Which texts a rank sees at a step is a
pure function of (seed, step, rank): different at every step and on every rank, equal in every run.
Not handled: data sets from files.

Paper: Section 8 (training workloads)
"""

from __future__ import annotations

import hashlib

PROMPTS: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", "The capital of France is Paris, on the river Seine."),
    ("Why is the sky blue?", "Air scatters short blue waves of sunlight far more than long red ones."),
    ("How many days has a leap year?", "A leap year has 366 days; February then has 29."),
    ("Name the three states of water.", "Water is ice when solid, water when liquid, and steam when a gas."),
    ("What does a compiler do?", "A compiler turns source code into instructions that a machine can run."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet around the year 1600."),
    ("What is seven times eight?", "Seven times eight is fifty-six."),
    ("How do bees make honey?", "Bees gather nectar, add enzymes, and dry it in the comb until it is thick."),
    ("What is a prime number?", "A prime number is larger than one and divisible only by one and itself."),
    ("Where do penguins live?", "Most penguins live in the southern hemisphere, many of them in Antarctica."),
    ("What is photosynthesis?", "Plants use light to turn water and carbon dioxide into sugar and oxygen."),
    ("How long is a marathon?", "A marathon is 42.195 kilometres, or a little over 26 miles."),
    ("What is the boiling point of water?", "At sea level water boils at 100 degrees Celsius."),
    ("Why do leaves change colour in autumn?", "The green chlorophyll breaks down and yellow and red pigments show."),
    ("What is a byte?", "A byte is eight bits and can hold 256 different values."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa in the early sixteenth century."),
    ("What causes the tides?", "The gravity of the moon, and less so of the sun, pulls on the oceans."),
    ("How does a bicycle stay upright?", "The rider steers into each lean, and the frame helps by its geometry."),
    ("What is the largest planet?", "Jupiter is the largest planet of the solar system."),
    ("What is a haiku?", "A haiku is a short Japanese poem, often of five, seven and five syllables."),
    ("Why does bread rise?", "Yeast eats sugar and gives off gas, which the dough holds in bubbles."),
    ("What is the square root of 144?", "The square root of 144 is twelve."),
    ("How do vaccines work?", "They show the body a harmless part of a germ, so that it learns to fight it."),
    ("What is inflation?", "Inflation is a general rise in prices, so that money buys less than before."),
    ("Which gas do we breathe in to live?", "We need oxygen, about a fifth of the air around us."),
    ("What is binary search?", "It halves a sorted range again and again until the wanted value is found."),
    ("What makes a rainbow?", "Drops of rain bend and split sunlight into its colours."),
    ("How far away is the moon?", "The moon is about 384,000 kilometres from the earth."),
    ("What is a metaphor?", "A metaphor speaks of one thing as if it were another to show a likeness."),
    ("Why do we have seasons?", "The axis of the earth is tilted, so each half leans towards the sun in turn."),
    ("What is the speed of light?", "Light travels almost 300,000 kilometres in a second."),
    ("What does DNA do?", "DNA stores the instructions that cells use to build proteins."),
)
"""(question, answer) pairs."""


def text(index: int) -> str:
    """Question and answer number `index` (modulo the set) as one training text."""
    question, answer = PROMPTS[index % len(PROMPTS)]
    return f"Question: {question}\nAnswer: {answer}"


def batch(*, seed: int, step: int, rank: int, size: int) -> list[str]:
    """The `size` texts of `rank` at `step`; the same arguments always give the same texts."""
    texts = []
    for row in range(size):
        key = hashlib.blake2b(f"{seed}/{step}/{rank}/{row}".encode(), digest_size=8).digest()
        texts.append(text(int.from_bytes(key, "little")))
    return texts
