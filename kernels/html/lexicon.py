"""The words that the HTML scanner knows: tags, hints in class names, and words of running text.

Only data for `sabia.kernels.html`. Class hints are matched anywhere in `class`, `id`,
`role` and `itemprop` of an element, in lower case; `_` stands for a boundary (a mark, a digit, the
end of the value, or a small letter before a capital), so `_ad_` does not match `header`.
"""

FORMATTING = (
    "b i em strong u s strike small big font tt sub sup abbr acronym cite code kbd samp var"
)
FORMATTING += (
    " mark ins del q dfn bdi bdo nobr time data ruby rt rp wbr"  # never nested into a tree
)
VOID = "br hr img input meta link base area col embed source track param"
RAW = "script style iframe noembed noframes textarea title xmp"  # no markup until their end tag
UNSEEN = "noscript template svg math select datalist object canvas video audio map dialog"
INLINE = "span label picture"
CELLS = "td th caption"
BLOCK = (
    "html head body article main nav header footer aside section form fieldset table thead tbody"
    " tfoot tr ul ol menu li dl dt dd blockquote figure figcaption pre button legend"
    " details summary address center p div h1 h2 h3 h4 h5 h6 option hgroup"
)

# what an ancestor's tag tells about the text inside it: flag of the tag
FLAGS = {
    "article": "article", "main": "main", "nav": "nav", "header": "header", "footer": "footer",
    "aside": "aside", "form": "form", "table": "table", "li": "item", "blockquote": "quote",
    "figure": "figure", "figcaption": "caption", "caption": "caption", "pre": "pre",
    "button": "button", "label": "button", "p": "paragraph", "dl": "definitions",
    "section": "section", "h1": "h1", "h2": "h2", "h3": "h3", "h4": "h4", "h5": "h5", "h6": "h5",
    "td": "cell", "th": "cell", "address": "address", "details": "details", "div": "",
}  # fmt: skip

HINTS = {
    "body": "articlebody article_body article_content articlecontent article_text articletext"
    " story_body storybody storytext story_text story_content entry_content entrycontent"
    " post_content"
    " postcontent post_body postbody post_text body_text bodytext body_content blog_content"
    " single_content article_copy body_copy news_text noticia_texto materia_conteudo texto_noticia"
    " mw_parser rich_text richtext rte_ wysiwyg _prose_ markdown",
    "content": "_content _conteudo _contenido _main_ main_content maincontent _text_ _texto _body_"
    " _copy_ primary",
    "article": "article _story _post_ _posts_ _entry hentry blog news_ noticia materia",
    "comment": "comment comentario disqus discussion _reply _replies respond livefyre",
    "nav": "_nav navbar navigation _menu submenu breadcrumb crumbs paginat _pager _tabs_ _tab_"
    " toolbar _skip _toc_ dropdown sitemap",
    "header": "header masthead _banner topbar _top_ hero _logo",
    "footer": "footer _foot_ copyright colophon contentinfo legal disclaimer rodape _bottom",
    "sidebar": "sidebar side_bar _aside complementary _rail_ widget _side_ secondary",
    "related": "related recommend _more_ trending popular most_read mostread mais_lidas also_"
    " recirc"
    " suggest outbrain taboola latest recent similar _next_ _prev_ previous read_next leia_mais"
    " relacionad upsell crosssell cross_sell featured",
    "social": "social share_ _share sharing addthis facebook twitter instagram whatsapp follow"
    " compartilh",
    "advert": "_ad_ _ads_ advert sponsor promo _dfp adsense _adv_ adslot ad_slot publicidade"
    " banner",
    "signup": "newsletter subscri signup sign_up login log_in sign_in signin paywall register donat"
    " _cta_ call_to_action assine cadastr optin opt_in contact_form wpcf _form_ search",
    "overlay": "cookie consent gdpr modal popup pop_up overlay lightbox tooltip notification _alert"
    " dialog offcanvas off_canvas drawer",
    "byline": "_meta_ _meta byline author autor _date _time timestamp datetime publish dateline"
    " posted _bio_ readtime read_time",
    "tags": "_tag_ _tags_ tagged taglist categor_ category categories keyword topics_ labels",
    "caption": "caption legenda credit photo_ _photo foto image _img figure gallery slideshow"
    " carousel"
    " slider video media_ player thumb",
    "unseen": "sr_only screen_reader visually_hidden visuallyhidden _hidden _hide_ a11y noprint"
    " no_print print_only d_none assistive",
    "shop": "product_ _price cart_ _cart_ rating basket checkout _sku variant wishlist swatch",
    "review": "review testimonial",
    "lead": "summary _lead_ subtitle subheadline standfirst _dek_ excerpt intro_ description"
    " abstract"
    " _sub_ linha_fina bajada deck",
    "title": "title headline heading titulo",
    "list": "_list _item _grid _card _cards_ teaser tile_ _tile listing collection archive results",
    "quote": "quote pullquote",
    "thread": "message_ _message thread topic_ question answer forum usertext post_message",
    "code": "highlight codehilite _code_ snippet syntax",
    "hub": "faq accordion feature pricing _steps_ benefit section_ panel tab_pane",
    "brief": "infobox _note_ _box_ _info_ fact callout inset editors_note correction",
    "user": "user_ profile avatar member account badge stats score_ vote",
    "button": "_btn button _link_ _links_ action",
}  # fmt: skip

# frequent small words of running text, by which prose differs from lists of names
STOP_WORDS = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an"
    " they which one you were all her she there would their we him been has when who will no"
    " more if"
    " out so what up its about than into them can only other this these those my your our do did"
    " de a o que e do da em um para com não uma os no se na por mais as dos como mas ao ele das à"
    " seu sua ou quando muito nos já eu também só pelo pela até isso ela entre depois sem mesmo aos"
    " foi são está ser tem el los las y en un una es del al lo le su pero sus este fue ha sobre"
    " le la les et des du est dans qui pas pour au sur ne ce il sont avec plus par der die das und"
    " ist von zu den mit nicht ein eine auf für dem sich auch es im wird che di il per non sono"
    " della het een van op te dat niet zijn и в не на что с по это как из"
)

# words of furniture in any language that is met often
FURNITURE = (
    "copyright cookies cookie privacy subscribe newsletter share tweet follow facebook twitter"
    " instagram linkedin pinterest whatsapp email comments comment reply advertisement sponsored"
    " sign login log register click menu search skip previous next related read more loading"
    " reserved terms policy compartilhar compartilhe comentários comentário publicidade assine"
    " cadastre receba leia mais siga anúncio continua relacionadas veja entrar buscar posted"
    " published updated print rights subscription unsubscribe inbox updates download app youtube"
    " telegram kommentare teilen datenschutz impressum compartir comentarios suscríbete partager"
    " commentaires abonnez tags filed author ago min"
)
