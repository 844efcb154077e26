"""The page of `hcb ui`: live taps, errors, devices and runs in a browser.

`index/` reads logs as they grow, and answers what the page asks, in bounded memory. `server/` serves the page and these
answers by HTTP. `page/` holds what the browser loads. docs/design/ui.md has the contract between server and page.
"""
