"""The demo: a real job, and what can be made wrong with it. Neither knows that anybody is watching."""
