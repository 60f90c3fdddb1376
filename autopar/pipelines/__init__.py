"""Pipeline schedules as data: their orders, how long they take, what they hold, and how a model is cut for them."""
