"""How fast training and sampling are beside other libraries."""
