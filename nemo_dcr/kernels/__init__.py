"""The hot loops behind one small interface: `plain` is numpy and the definition."""
