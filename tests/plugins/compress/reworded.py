"""Documents in three languages with one planted fact each, and a question that shares no telling word with it.

Written after the method ``semantic`` worked, and not used to choose any of its numbers. Apart from ``planted.py``
in two ways: no two sentences of a document have the same form, and a third of the facts are told in two sentences, of
which the second one only says "it" or "she".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from attrs import frozen

__all__ = ["Language", "RewordedDocument", "reworded_documents"]

Language = Literal["english", "german", "spanish", "french", "italian", "dutch"]

_NUM_OTHERS = 40


@frozen
class RewordedDocument:
    """A document, the sentences of its fact, and the question."""

    language: Language
    text: str
    fact: tuple[str, ...]
    question: str


_ENGLISH = (
    "The library closes an hour earlier while its heating is being replaced.",
    "Mr. Pettifer has collected barometers since he was nine.",
    "Half of the orchard was cut down to make room for a car park.",
    "In spring the river smells of iron and wet leaves.",
    "A lorry full of oranges overturned near the toll bridge in 1974.",
    "The council voted twice and still could not agree on the colour of the benches.",
    "Children used to slide down the embankment on tea trays.",
    "The new dentist plays the accordion at weddings.",
    "Postcards of the old spa sell for more than forty pounds at auctions.",
    "Three of the five wells ran dry in the summer of 1921.",
    "Nora Quist paints only doors, never the houses they belong to.",
    "The bus shelter was designed by a student who later built airports.",
    "Fog often stays in the lower streets until eleven.",
    "A stone lion without a head marks the corner of Cooper Lane.",
    "The butcher's son became a marine biologist in Tasmania.",
    "Every second winter the tennis courts are flooded for skating.",
    "The telephone exchange employed sixteen women until it was automated.",
    "Some of the street names were misspelt for decades.",
    "The savings bank gave each newborn a small tin box.",
    "An owl has nested in the water tower for several years.",
    "The weekly market moved to Wednesday after a petition.",
    "Cyclists complain about the cobbles in front of the town hall.",
    "The town's only lift is in the department store and moves very slowly.",
    "Two brothers opened a shop for chess sets and went bankrupt within a year.",
    "The gravel pit turned into a lake where people now sail.",
    "Mrs. Abernathy translates operating manuals from Finnish.",
    "The statue of the admiral looks away from the sea.",
    "During the strike the miners were fed by a convent.",
    "The school orchestra owns a harp that none of the pupils can tune.",
    "Lightning struck the flagpole on the mayor's birthday.",
    "The map in the waiting room still shows two countries that no longer exist.",
    "A retired sailor repairs umbrellas in a kiosk under the viaduct.",
    "The chestnut trees along the avenue suffer from a moth.",
    "In the cellar of the brewery there is a bowling alley with two lanes.",
    "The local newspaper printed its last edition on pink paper.",
    "Visitors leave coins in the boots of the bronze shepherd.",
    "The allotments behind the hospital have a waiting list of six years.",
    "A meteorologist lodged in the attic and measured the wind for a decade.",
    "The carnival procession has followed the same route since 1888.",
    "Swans block the towpath in May, and walkers have to turn round.",
    "The notary keeps a parrot skeleton on his desk.",
    "Salt was carried over the pass by mules before the tunnel was dug.",
    "The fire brigade rehearses in an abandoned warehouse by the canal.",
    "A tailor from Lodz introduced the town to poppy seed cake.",
)
_GERMAN = (
    "Die Bücherei schließt eine Stunde früher, weil die Heizung ersetzt wird.",
    "Herr Lindner sammelt seit seiner Kindheit Barometer.",
    "Die Hälfte der Obstwiese wich einem Parkplatz.",
    "Im Frühling riecht der Fluss nach Eisen und nassem Laub.",
    "1974 kippte an der Mautbrücke ein Lastwagen voller Orangen um.",
    "Der Gemeinderat stimmte zweimal ab und fand trotzdem keine Farbe für die Bänke.",
    "Früher rutschten Kinder auf Tabletts die Böschung hinunter.",
    "Die neue Zahnärztin spielt auf Hochzeiten Akkordeon.",
    "Postkarten des alten Kurhauses erzielen bei Auktionen hohe Preise.",
    "Drei der fünf Brunnen versiegten im Sommer 1921.",
    "Nora Quist malt nur Türen, niemals die Häuser dazu.",
    "Das Wartehäuschen entwarf ein Student, der später Flughäfen baute.",
    "Der Nebel bleibt in den unteren Gassen oft bis elf Uhr.",
    "Ein steinerner Löwe ohne Kopf steht an der Ecke der Böttchergasse.",
    "Der Sohn des Metzgers wurde Meeresbiologe in Tasmanien.",
    "Jeden zweiten Winter werden die Tennisplätze zum Eislaufen geflutet.",
    "In der Telefonzentrale arbeiteten sechzehn Frauen, bis sie automatisiert wurde.",
    "Einige Straßennamen waren jahrzehntelang falsch geschrieben.",
    "Die Sparkasse schenkte jedem Neugeborenen eine Blechdose.",
    "Im Wasserturm nistet seit Jahren eine Eule.",
    "Der Wochenmarkt wurde nach einer Unterschriftensammlung auf Mittwoch verlegt.",
    "Radfahrer beschweren sich über das Pflaster vor dem Rathaus.",
    "Der einzige Aufzug der Stadt befindet sich im Kaufhaus und fährt sehr langsam.",
    "Zwei Brüder eröffneten einen Laden für Schachspiele und gingen bald pleite.",
    "Aus der Kiesgrube wurde ein See, auf dem heute gesegelt wird.",
    "Frau Adomeit übersetzt Bedienungsanleitungen aus dem Finnischen.",
    "Das Denkmal des Admirals blickt vom Meer weg.",
    "Während des Streiks wurden die Bergleute von einem Kloster verpflegt.",
    "Das Schulorchester besitzt eine Harfe, die keiner der Schüler stimmen kann.",
    "Am Geburtstag des Bürgermeisters schlug der Blitz in den Fahnenmast ein.",
    "Die Landkarte im Wartezimmer zeigt noch zwei untergegangene Staaten.",
    "Ein pensionierter Matrose repariert unter dem Viadukt Regenschirme.",
    "Die Kastanien der Allee leiden unter einer Motte.",
    "Im Keller der Brauerei gibt es eine Kegelbahn.",
    "Die Lokalzeitung druckte ihre letzte Ausgabe auf rosa Papier.",
    "Besucher legen Münzen in die Stiefel des bronzenen Hirten.",
    "Für die Schrebergärten hinter dem Krankenhaus wartet man sechs Jahre.",
    "Ein Meteorologe maß vom Dachboden aus zehn Jahre lang den Wind.",
    "Der Karnevalszug nimmt seit 1888 denselben Weg.",
    "Im Mai versperren Schwäne den Treidelpfad.",
    "Der Notar hat ein Papageienskelett auf seinem Schreibtisch.",
    "Vor dem Bau des Tunnels trugen Maultiere das Salz über den Pass.",
    "Die Feuerwehr übt in einem verlassenen Lagerhaus am Kanal.",
    "Ein Schneider aus Lodz machte den Mohnkuchen in der Stadt bekannt.",
)
_SPANISH = (
    "La biblioteca cierra una hora antes mientras cambian la calefacción.",
    "El señor Larrea colecciona barómetros desde los nueve años.",
    "La mitad del huerto fue talada para hacer un aparcamiento.",
    "En primavera el río huele a hierro y a hojas mojadas.",
    "En 1974 volcó un camión lleno de naranjas junto al puente de peaje.",
    "El concejo votó dos veces y no se puso de acuerdo sobre el color de los bancos.",
    "Antes los niños bajaban por el terraplén sentados en bandejas.",
    "La nueva dentista toca el acordeón en las bodas.",
    "Las postales del antiguo balneario se venden muy caras en las subastas.",
    "Tres de los cinco pozos se secaron en el verano de 1921.",
    "Nora Quist solo pinta puertas, nunca las casas a las que pertenecen.",
    "La marquesina la diseñó un estudiante que después construyó aeropuertos.",
    "La niebla suele quedarse en las calles bajas hasta las once.",
    "Un león de piedra sin cabeza señala la esquina de la calle Toneleros.",
    "El hijo del carnicero se hizo biólogo marino en Tasmania.",
    "Un invierno de cada dos inundan las pistas de tenis para patinar.",
    "En la central telefónica trabajaron dieciséis mujeres hasta que la automatizaron.",
    "Algunos nombres de calles estuvieron mal escritos durante décadas.",
    "La caja de ahorros regalaba una cajita de lata a cada recién nacido.",
    "Desde hace años anida un búho en el depósito de agua.",
    "El mercado semanal pasó al miércoles después de una recogida de firmas.",
    "Los ciclistas se quejan del empedrado delante del ayuntamiento.",
    "El único ascensor de la ciudad está en los grandes almacenes y va muy despacio.",
    "Dos hermanos abrieron una tienda de ajedrez y quebraron en un año.",
    "La gravera se convirtió en un lago donde ahora se navega a vela.",
    "La señora Abad traduce manuales de uso del finés.",
    "La estatua del almirante mira hacia tierra adentro.",
    "Durante la huelga un convento dio de comer a los mineros.",
    "La orquesta del colegio tiene un arpa que ningún alumno sabe afinar.",
    "Un rayo cayó en el mástil el día del cumpleaños del alcalde.",
    "El mapa de la sala de espera todavía muestra dos países desaparecidos.",
    "Un marinero jubilado arregla paraguas bajo el viaducto.",
    "Los castaños de la avenida sufren una plaga de polillas.",
    "En el sótano de la cervecería hay una bolera con dos pistas.",
    "El periódico local imprimió su última edición en papel rosa.",
    "Los visitantes dejan monedas en las botas del pastor de bronce.",
    "Para los huertos detrás del hospital hay una lista de espera de seis años.",
    "Un meteorólogo midió el viento desde el desván durante diez años.",
    "El desfile de carnaval sigue el mismo recorrido desde 1888.",
    "En mayo los cisnes cortan el camino de sirga.",
    "El notario tiene un esqueleto de loro en su escritorio.",
    "Antes del túnel, las mulas llevaban la sal por el puerto de montaña.",
    "Los bomberos ensayan en un almacén abandonado junto al canal.",
    "Un sastre de Lodz dio a conocer en la ciudad el pastel de amapola.",
)
_FACTS: dict[Language, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "english": (
        ("Passports are issued on Thursdays only, in room 14.", "Where do I have to go to get my travel document?"),
        ("Mushrooms from the northern woods must not be eaten raw.", "Is it safe to consume fungi without cooking?"),
        ("The night train was abolished in October.", "Can I still travel by rail after midnight?"),
        ("Whoever finds a purse may keep a tenth of the money.", "What reward is there for lost property?"),
        ("The physician visits the island every other Friday.", "How often does a doctor come?"),
        ("Ms. Ferrante runs the kindergarten.", "She was a lion tamer before.", "Which job did its head have earlier?"),
        ("The old ice house is rented out.", "It costs eighty pounds a night.", "What is the price of staying there?"),
        ("A dam protects the valley.", "It broke once, in 1953.", "Has the barrier ever failed?"),
    ),
    "german": (
        ("Reisepässe gibt es nur donnerstags in Zimmer 14.", "Wo bekomme ich ein Ausweisdokument für den Urlaub?"),
        ("Pilze aus dem Nordwald dürfen nicht roh gegessen werden.", "Muss man Champignons vor dem Verzehr kochen?"),
        ("Der Nachtzug wurde im Oktober abgeschafft.", "Kann man nach Mitternacht noch mit der Bahn fahren?"),
        ("Wer eine Geldbörse findet, darf ein Zehntel behalten.", "Wie hoch ist der Lohn für verlorene Sachen?"),
        ("Der Doktor kommt jeden zweiten Freitag auf die Insel.", "Wie oft ist medizinische Hilfe da?"),
        (
            "Frau Ferrante leitet den Kindergarten.",
            "Vorher war sie Löwenbändigerin.",
            "Welchen Beruf hatte die Chefin?",
        ),
        ("Das alte Eishaus wird vermietet.", "Es kostet achtzig Euro.", "Zu welchem Preis kann man dort übernachten?"),
        ("Ein Damm schützt das Tal.", "1953 ist er gebrochen.", "Hat die Talsperre jemals versagt?"),
    ),
    "spanish": (
        ("Los pasaportes solo se expiden los jueves en la sala 14.", "¿Adónde voy por un documento de viaje?"),
        ("Las setas del bosque norte no deben comerse crudas.", "¿Hay que cocinar los hongos?"),
        ("El tren nocturno fue suprimido en octubre.", "¿Se puede viajar en ferrocarril después de medianoche?"),
        ("Quien encuentra una cartera puede quedarse la décima parte.", "¿Qué recompensa hay por un objeto perdido?"),
        ("El doctor visita la isla un viernes de cada dos.", "¿Con qué frecuencia llega el médico?"),
        ("La señora Ferrante dirige la guardería.", "Antes fue domadora.", "¿Qué trabajo tuvo la directora?"),
        ("La antigua casa del hielo se alquila.", "Cuesta ochenta euros.", "¿Qué precio tiene dormir ahí?"),
        ("Una presa protege el valle.", "Se rompió en 1953.", "¿Ha fallado alguna vez el dique?"),
    ),
}
_OTHERS: dict[Language, tuple[str, ...]] = {"english": _ENGLISH, "german": _GERMAN, "spanish": _SPANISH}


def reworded_documents() -> Iterator[RewordedDocument]:
    """Yield eight documents in each language, each with its fact somewhere else."""
    for language, facts in _FACTS.items():
        for number, (*fact, question) in enumerate(facts):
            drawn = random.Random(f"{language} {number}")
            sentences = drawn.sample(_OTHERS[language], _NUM_OTHERS)
            place = drawn.randrange(4, _NUM_OTHERS - 4)
            sentences[place:place] = fact
            paragraphs = [" ".join(sentences[start : start + 6]) for start in range(0, len(sentences), 6)]
            yield RewordedDocument(language, "\n\n".join(paragraphs), tuple(fact), question)
