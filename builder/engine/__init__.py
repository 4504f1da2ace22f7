"""The engine room: the only part of the builder that starts processes or talks to the Docker Engine."""
