"""Models of the hub: names, files, downloads; against a hub that runs here."""
