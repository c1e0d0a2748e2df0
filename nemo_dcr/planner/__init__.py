"""How long a refit will take, what it will move and hold, and when sending every weight is the better choice."""
