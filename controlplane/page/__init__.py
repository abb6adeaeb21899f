"""The operator's page: the cluster as this replica sees it, rendered on the server."""
