"""Language identification: own sentences in many languages, and real text where there is some."""

import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.classify import language
from sabia.core.text.classify.language import load
from sabia.kernels.language.definitions import LONGEST, MOST, Table
from sabia.kernels.language.interface import score
from sabia.kernels.language.numba_impl import features
from sabia.kernels.text.character_flags import ALPHA, SOLO
from sabia.kernels.text.words import flags_of

SENTENCES = {
    "pt": [
        "O professor explicou a regra duas vezes, mas metade da turma continuou sem entender.",
        "Choveu tanto em março que as estradas ficaram fechadas durante três semanas.",
        "Se você quiser, podemos jantar mais cedo e depois ver o filme.",
        "A câmara municipal aprovou ontem o orçamento para as obras do novo hospital.",
        "Nenhum dos barcos voltou antes do pôr do sol.",
    ],
    "en": [
        "The teacher explained the rule twice, yet half of the class still did not understand.",
        "It rained so much in March that the roads were closed for three weeks.",
        "If you want, we can have dinner earlier and watch the film afterwards.",
        "The city council approved the budget for the new hospital yesterday.",
        "None of the boats returned before sunset.",
    ],
    "es": [
        "El profesor explicó la regla dos veces, pero la mitad de la clase siguió sin entenderla.",
        "Llovió tanto en marzo que las carreteras estuvieron cerradas durante tres semanas.",
        "Si quieres, podemos cenar más temprano y después ver la película.",
        "El ayuntamiento aprobó ayer el presupuesto para las obras del nuevo hospital.",
        "Ninguno de los barcos volvió antes de la puesta del sol.",
    ],
    "fr": [
        "Le professeur a expliqué la règle deux fois, la moitié de la classe n'a pas compris.",
        "Il a tellement plu en mars que les routes sont restées fermées pendant trois semaines.",
        "Si tu veux, nous pouvons dîner plus tôt et regarder le film ensuite.",
        "Le conseil municipal a approuvé hier le budget des travaux du nouvel hôpital.",
        "Aucun des bateaux n'est revenu avant le coucher du soleil.",
    ],
    "de": [
        "Der Lehrer erklärte die Regel zweimal, doch die halbe Klasse verstand sie noch nicht.",
        "Im März regnete es so viel, dass die Straßen drei Wochen lang gesperrt waren.",
        "Wenn du willst, können wir früher essen und danach den Film ansehen.",
        "Der Stadtrat hat gestern den Haushalt für das neue Krankenhaus beschlossen.",
        "Keines der Boote kehrte vor Sonnenuntergang zurück.",
    ],
    "it": [
        "Il professore ha spiegato la regola due volte, ma metà della classe non ha capito.",
        "A marzo è piovuto così tanto che le strade sono rimaste chiuse per tre settimane.",
        "Se vuoi, possiamo cenare prima e poi guardare il film.",
        "Il consiglio comunale ha approvato ieri il bilancio per i lavori del nuovo ospedale.",
        "Nessuna delle barche è tornata prima del tramonto.",
    ],
    "nl": [
        "De leraar legde de regel twee keer uit, maar de helft van de klas begreep het nog niet.",
        "In maart regende het zo veel dat de wegen drie weken lang gesloten waren.",
    ],
    "ca": [
        "El professor va explicar la regla dues vegades, però ningú no la va entendre.",
        "Al març va ploure tant que les carreteres van estar tancades durant tres setmanes.",
    ],
    "el": ["Ο δάσκαλος εξήγησε τον κανόνα δύο φορές."],
    "he": ["המורה הסביר את הכלל פעמיים."],
    "th": ["ครูอธิบายกฎสองครั้งแล้ว"],
    "ko": ["선생님은 규칙을 두 번 설명했습니다."],
    "ja": ["先生は規則を二回説明しました。"],
    "zh": ["老师把规则解释了两遍。"],
    "pl": ["Nauczyciel wyjaśnił zasadę dwa razy, ale połowa klasy nadal jej nie zrozumiała."],
    "fi": [
        "Opettaja selitti säännön kahdesti, mutta puolet luokasta ei vieläkään ymmärtänyt sitä."
    ],
    "tr": ["Öğretmen kuralı iki kez açıkladı, ancak sınıfın yarısı hâlâ anlamadı ve sordu."],
    "ru": ["Учитель дважды объяснил правило, но половина класса так ничего и не поняла."],
    "uk": ["Вчитель двічі пояснив правило, але половина класу так нічого і не зрозуміла."],
    "bg": ["Учителят обясни правилото два пъти, но половината клас не разбра нищо."],
    "sr": ["Учитељ је два пута објаснио правило, али половина разреда ништа није разумела."],
    "gl": ["O profesor explicou a regra dúas veces, pero a metade da clase non a entendeu."],
    "ar": ["شرح المعلم القاعدة مرتين لكن نصف الطلاب لم يفهموا شيئا"],
    "fa": ["معلم قانون را دو بار توضیح داد اما نیمی از کلاس آن را نفهمید"],
    "ur": ["استاد نے قاعدہ دو بار سمجھایا لیکن آدھی جماعت پھر بھی نہیں سمجھی"],
    "hi": ["अध्यापक ने नियम दो बार समझाया लेकिन आधी कक्षा फिर भी नहीं समझी"],
    "mr": ["शिक्षकांनी नियम दोन वेळा समजावून सांगितला पण अर्ध्या वर्गाला तो कळला नाही"],
    "und": [
        "xq zzv wkpt brrgh plomk dfgh qwrt zxcv bnmk lkjh gfds poiu",
        "12 34 56 78 90 = 270",
        "",
        "...",
    ],
}


def identify(texts: list[str]) -> list[str]:
    return language.names_of(texts)


def share(texts: list[str], expected: str) -> float:
    return identify(texts).count(expected) / len(texts)


@pytest.mark.parametrize("expected", SENTENCES)
def test_sentences_of_every_language(expected: str) -> None:
    assert identify(SENTENCES[expected]) == [expected] * len(SENTENCES[expected])


def test_the_answer_does_not_depend_on_the_company() -> None:
    texts = [text for group in SENTENCES.values() for text in group]
    together = identify(texts)
    assert together == [identify([text])[0] for text in texts]
    assert identify([t.upper() for t in SENTENCES["pt"]]) == ["pt"] * len(SENTENCES["pt"])


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    long = " ".join(SENTENCES["pt"]) * 40
    assert identify([long + " the end of it" * 400]) == ["pt"]


def test_odd_texts() -> None:
    texts = [
        "x" * 2_000_000,
        "1" * 10_000,
        "\x00\u200b\ufeff",
        "👍🏽" * 5000,
        "𠀀𠀁" * 9,
        "e\u0301" * 99,
    ]
    assert identify(texts)[1:5] == ["und", "und", "und", "zh"]


def test_confidence_is_a_probability() -> None:
    texts = [text for group in SENTENCES.values() for text in group]
    data, offsets = text_buffers(pa.array(texts))
    verdict = language.identify(data, offsets)
    assert np.all((verdict.confidence >= 0) & (verdict.confidence <= 1))
    assert verdict.confidence[texts.index("")] == 0


@pytest.fixture(scope="module")
def real() -> Path:
    if "SABIA_TEST_DATA" not in os.environ:
        pytest.skip("SABIA_TEST_DATA is unset: no real texts to try")
    return Path(os.environ["SABIA_TEST_DATA"]) / "text"


def test_portuguese_news_sentences(real: Path) -> None:
    lines = (real / "bosque/pt_bosque-ud-dev.conllu").read_text().splitlines()
    sentences = [line[9:] for line in lines if line.startswith("# text = ")]
    whole = [s for s in sentences if len(s.split()) >= 5]
    assert len(whole) > 1000
    assert share(whole, "pt") >= 0.96  # Galician is among the 78 languages


def test_portuguese_novels(real: Path) -> None:
    for novel in sorted((real / "machado").glob("*.txt")):
        sentences = [s for s in re.split(r"(?<=[.!?])\s+", novel.read_text()) if len(s.split()) > 4]
        assert share(sentences, "pt") >= 0.97, novel.name
        paragraphs = [" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4)]
        assert share(paragraphs, "pt") >= 0.995, novel.name


def test_english_plays(real: Path) -> None:
    text = (real / "shakespeare/tinyshakespeare.txt").read_text()
    speeches = [s for s in text.split("\n\n") if len(s.split()) > 5]
    assert len(speeches) > 5000
    assert share(speeches, "en") >= 0.97


def random_words(source: random.Random) -> str:
    """Words of several scripts, some of them long, some repeated, with digits and marks between."""
    letters = (
        "abcdefghinorstuvz",
        "áçãéõ",
        "абвгде",
        "ابتث",
        "漢字かな",
        "ไทย",
        "İK",
        "\U00020000",
    )
    words = []
    for _ in range(source.randrange(400)):
        size = source.choice((1, 2, 3, 5, 8, 13, 30))
        words.append("".join(source.choices(source.choice(letters), k=size)))
    words += source.choices([*words, "the", "de", "que", "и", "x1y"], k=source.randrange(200))
    source.shuffle(words)
    return "".join(word + source.choice((" ", "  ", ", ", "-", "7", "\n")) for word in words)


def naive_score(
    text: str, table: Table, keys: dict[int, int]
) -> tuple[Counter[int], int, Counter[int], int]:
    """(sums of rows by language, features found, listed words by language, words)."""
    sums, hits = Counter[int](), Counter[int]()
    used = words = letters = 0
    for run in "".join(c if flags_of(c) & ALPHA and not flags_of(c) & SOLO else " " for c in
                       text.encode()[: 8 * MOST].decode(errors="ignore")).split():  # fmt: skip
        if letters >= MOST:
            break
        words, letters = words + 1, letters + min(len(run), LONGEST)
        for key, whole in zip(*features(run), strict=True):
            row = keys.get(int(key), -1)
            used += row >= 0
            for number in range(table.languages if row >= 0 else 0):
                sums[number] += int(table.values[row, number])
                hits[number] += bool(whole) and int(table.known[row]) >> number & 1
    return sums, used, hits, words


def test_scores_equal_plain_sums_alone_and_together() -> None:
    source = random.Random(3)
    texts = ["", "a", " de ", "x" * 2000, "é" * 5000, *(random_words(source) for _ in range(60))]
    table = load()[1]
    keys = {key: row for row, key in enumerate(table.keys.tolist())}
    together = score(*text_buffers(pa.array(texts, pa.string())), table, "numba")
    for i, text in enumerate(texts):
        alone = score(*text_buffers(pa.array([text], pa.string())), table, "numba")
        assert all((a[0] == b[i]).all() for a, b in zip(alone, together, strict=True)), text
        sums, used, hits, words = naive_score(text, table, keys)
        numbers = range(table.languages)
        assert together[0][i].tolist() == [sums[c] for c in numbers], text
        assert (together[1][i], together[3][i]) == (used, words), text
        assert together[2][i].tolist() == [hits[c] for c in numbers], text
        scripts = Counter(
            table.scripts[ord(c)] if ord(c) < len(table.scripts) else len(together[4][i]) - 1
            for c in text.encode()[: 8 * MOST].decode(errors="ignore")[: 4 * MOST]
            if flags_of(c) & ALPHA
        )  # fmt: skip
        assert together[4][i].tolist() == [scripts[k] for k in range(len(together[4][i]))], text
