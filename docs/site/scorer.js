// The order of what a search finds (`html_search_scorer`). Sphinx puts an object of the API before every page that has
// the word. Here guides come first, then other pages, then the API. If the query is written like a name in code, the
// object of that name is the first.
const isGuide = (page) => /^(README|docs\/(?!README|keys|blocks|faults|trainer-table)[\w-]+)$/.test(page);
const isName = (query) => /[_.]|[a-z][A-Z]/.test(query);

var Scorer = {
  score: ([page, , , , score, , kind]) => {
    // Between a heading of another page (15) and the title of a page or an object that is the whole query (16).
    if (isGuide(page)) return score + 10.5;
    if (isName(new URLSearchParams(window.location.search).get("q") ?? "")) return score;
    if (kind === "object" || kind === "index") return score - 200;
    return page.startsWith("docs/site/api/") ? score - 100 : score;
  },
  // Sphinx's own
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
