"""The one engine of all studies: an agent is trained, evaluated at places, judged, and its rows are stored."""
