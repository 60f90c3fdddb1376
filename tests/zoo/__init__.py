"""The zoo: architectures that test the whole compiler, unmodified, with their losses and small configurations."""

from __future__ import annotations

import transformers

from tests.zoo.entry import Entry
from tests.zoo.image_models import IMAGES
from tests.zoo.media import MEDIA
from tests.zoo.more import MORE
from tests.zoo.others import OTHERS
from tests.zoo.text import TEXT

transformers.logging.set_verbosity_error()

ZOO: dict[str, Entry] = {e.name: e for e in (*TEXT, *MEDIA, *IMAGES, *OTHERS, *MORE)}
