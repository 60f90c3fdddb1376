"""Importing any test lets ``search="random:SEED"`` draw plans that no search would take."""

from tests import random_plans as random_plans
