"""The items of the tasks `capabilities`, drawn with a fixed seed; run it to write their files."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "core/bench/definitions/capabilities"
CITIES = ["Recife", "Lisbon", "Manaus", "Kyoto", "Nairobi", "Porto Alegre", "Oslo", "Salvador"]
NAMES = ["Ana", "Bruno", "Clara", "Davi", "Elisa", "Fábio", "Grace", "Hugo"]
Row = dict[str, Any]


def function_calls(count: int = 120) -> Iterator[Row]:
    """Requests in English and Portuguese whose arguments stand in them, each with its call."""
    draw = random.Random(1)

    def two() -> list[str]:
        return draw.sample(CITIES, 2)

    for number in range(count):
        clock = f"{draw.randrange(6, 23):02}:{draw.randrange(0, 60, 5):02}"
        date = f"2027-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
        (a, b), who, portuguese = two(), draw.choice(NAMES), number // 12 % 2
        n = draw.randrange(2, 98)
        day = draw.choice(["Monday", "Friday", "Sunday"])
        word = draw.choice(["dentist", "rehearsal", "invoice"])
        dish = draw.choice(["Casa Lima", "Blue Door", "Sete Mares"])
        money, other = draw.sample(["BRL", "EUR", "USD", "JPY"], 2)
        text = draw.choice(["I am late", "see you soon", "the key is under the mat"])
        artist = draw.choice(["Cartola", "Nina Simone", "Elis Regina"])
        symbol = "".join(draw.sample("BCDFGKLMNPRSTV", 4))
        mode, room = draw.choice(["car", "train", "bicycle"]), draw.choice(["kitchen", "hall"])
        language = draw.choice(["French", "German", "Japanese"])
        meio = {"car": "carro (car)", "train": "trem (train)", "bicycle": "bicicleta (bicycle)"}
        name, arguments, english, translated = (
            ("get_weather", {"city": a, "day": day}, f"How is the weather in {a} on {day}?",
             f"Como estará o tempo em {a} no dia \"{day}\"?"),
            ("convert_currency", {"amount": n, "source": money, "target": other},
             f"How much is {n} {money} in {other}?", f"Quanto são {n} {money} em {other}?"),
            ("set_alarm", {"time": clock, "label": word},
             f"Wake me at {clock}, with the label {word}.",
             f"Coloque um alarme para {clock} com o nome {word}."),
            ("send_message", {"recipient": who, "text": text}, f'Tell {who}: "{text}".',
             f'Mande para {who} a mensagem "{text}".'),
            ("search_flights", {"origin": a, "destination": b, "date": date},
             f"I need a flight from {a} to {b} on {date}.",
             f"Preciso de um voo de {a} para {b} em {date}."),
            ("book_table", {"restaurant": dish, "people": n % 9 + 2, "time": clock},
             f"A table for {n % 9 + 2} at {dish}, {clock}, please.",
             f"Uma mesa para {n % 9 + 2} pessoas no {dish} às {clock}, por favor."),
            ("create_event", {"title": word, "date": date, "time": clock},
             f"Put {word} in my calendar on {date} at {clock}.",
             f"Anote {word} na agenda, dia {date}, {clock}."),
            ("translate", {"text": text, "language": language},
             f'What is "{text}" in {language}?', f'Traduza "{text}" para a língua {language}.'),
            ("play_music", {"artist": artist, "volume": n}, f"Play {artist} at volume {n}.",
             f"Toque {artist} com volume {n}."),
            ("get_stock_price", {"symbol": symbol}, f"What does a share of {symbol} cost now?",
             f"Quanto custa agora uma ação de {symbol}?"),
            ("get_distance", {"origin": a, "destination": b, "mode": mode},
             f"How far is it from {a} to {b} by {mode}?",
             f"Qual é a distância de {a} a {b} de {meio[mode]}?"),
            ("set_light", {"room": room, "on": True, "brightness": n},
             f"Switch on the light of the {room} at {n} percent.",
             f'Acenda a luz do cômodo "{room}" com {n} por cento.'),
        )[number % 12]  # fmt: skip
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        question = translated if portuguese else english
        yield {"id": f"call-{number:03}", "question": question, "answer": call}


def word_problems(count: int = 160) -> Iterator[Row]:
    """Problems in English and Portuguese, of whole numbers."""
    draw = random.Random(2)
    for number in range(count):
        a, b, c = draw.randrange(5, 40), draw.randrange(2, 12), draw.randrange(2, 9)
        who, other = draw.sample(NAMES, 2)
        english, portuguese, answer = (
            (f"{who} has {a} boxes with {b} pens each and gives {c} pens away. How many are left?",
             f"{who} tem {a} caixas com {b} canetas cada e dá {c} canetas. Quantas restam?",
             a * b - c),
            (f"A train has {b} wagons of {a + c} seats. {c * b} seats are taken, and {c} people "
             "get on and sit down. How many seats are free?",
             f"Um trem tem {b} vagões de {a + c} lugares. {c * b} lugares estão ocupados, e {c} "
             "pessoas entram e se sentam. Quantos lugares estão livres?",
             a * b - c),
            (f"{who} saves {a} reais a week for {b} weeks, then spends half of {2 * c} reais. How "
             "many reais remain?",
             f"{who} guarda {a} reais por semana durante {b} semanas e depois gasta metade de "
             f"{2 * c} reais. Quantos reais sobram?", a * b - c),
            (f"A field is {a} m long and {b} m wide. What is the length of a fence around it, with "
             f"a gate of {c} m left open, in metres?",
             f"Um campo tem {a} m de comprimento e {b} m de largura. Qual é o comprimento de uma "
             f"cerca ao redor, com um portão de {c} m aberto, em metros?", 2 * (a + b) - c),
            (f"{who} is {a} years old. {other} is {b} years older, and their aunt is {c} times as "
             f"old as {other}. How old is the aunt?",
             f"{who} tem {a} anos. {other} é {b} anos mais velho, e a tia tem {c} vezes a idade de "
             f"{other}. Quantos anos tem a tia?", (a + b) * c),
            (f"A shop sells {a} loaves on Monday, {b} more on Tuesday, and on Wednesday as many as "
             f"on both days, less {c}. How many on Wednesday?",
             f"Uma loja vende {a} pães na segunda, {b} a mais na terça, e na quarta tantos quanto "
             f"nos dois dias, menos {c}. Quantos na quarta?", 2 * a + b - c),
            (f"{c} friends share {b * c} euros equally, and each then pays 1 euro for the bus. How "
             "many euros does each have?",
             f"{c} amigos dividem {b * c} euros igualmente, e cada um paga 1 euro pelo ônibus. "
             "Quantos euros tem cada um?", b - 1),
            (f"A tank of {a * 10} litres loses {b} litres an hour for {c} hours, and is then "
             f"filled up by {c} litres. How many litres are in it?",
             f"Um tanque de {a * 10} litros perde {b} litros por hora durante {c} horas, e depois "
             f"recebe {c} litros. Quantos litros há nele?", a * 10 - b * c + c),
        )[number % 8]  # fmt: skip
        question = portuguese if number // 8 % 2 else english
        yield {"id": f"problem-{number:03}", "question": question, "answer": str(answer)}


def needles() -> Iterator[Row]:
    """A code at five depths of texts of four lengths, with three codes of other places."""
    draw = random.Random(3)
    places = ["the archive", "the north gate", "the cellar", "the laboratory", "the boathouse"]
    for length in (50, 200, 400, 800):
        for depth in range(5):
            for copy in range(5):
                chosen = draw.sample(places, 4)
                hidden = []
                for number, place in enumerate(chosen):
                    at = depth * (length - 1) // 4 if number == 0 else draw.randrange(length)
                    code = f"{draw.randrange(10**6):06}"
                    hidden.append({"place": place, "code": code, "at": at})
                yield {
                    "id": f"needle-{length}-{depth}-{copy}", "sentences": length,
                    "salt": draw.randrange(10**4), "place": chosen[0], "code": hidden[0]["code"],
                    "needles": hidden,
                }  # fmt: skip


FILES = {"function_calls": function_calls, "word_problems": word_problems, "needle": needles}


def text_of(name: str) -> str:
    """The JSON lines of a file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in FILES[name]())


if __name__ == "__main__":
    for name in FILES:
        (FOLDER / f"{name}.jsonl").write_text(text_of(name), "utf-8")
