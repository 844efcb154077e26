"""Serves the page and its data by HTTP: `app` has the paths, `access` who may ask, `serving` runs it."""
