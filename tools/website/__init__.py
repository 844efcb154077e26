"""Builds the documentation site: stages the pages, executes the gallery, writes the reference, runs MkDocs."""
