"""A page for each family, from its docstrings, its contract rows and its macros."""

from neuronjax.tools.family_pages.families import FAMILY_PAGES as FAMILY_PAGES
from neuronjax.tools.family_pages.families import FamilyPage as FamilyPage
from neuronjax.tools.family_pages.index import index_page as index_page
from neuronjax.tools.family_pages.page import family_page as family_page
