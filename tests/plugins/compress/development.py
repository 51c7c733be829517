"""Documents on which changes of ``semantic`` are tried, in languages and with facts that no other set has.

Of the form of ``reworded.py``, which is kept for measuring: one fact among forty other sentences, three of eight facts
told in two sentences, and questions in other words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .reworded import Language, RewordedDocument

__all__ = ["development_documents"]

_NUM_OTHERS = 40

_FRENCH = (
    "La piscine restera fermée pendant la réparation du toit.",
    "Monsieur Garrigue élève des pigeons voyageurs depuis l'enfance.",
    "Le cinéma a vendu ses fauteuils rouges aux habitants.",
    "En hiver, la place sent les marrons grillés.",
    "Une péniche chargée de blé s'est échouée près de l'écluse en 1962.",
    "Le maire hésite encore sur la forme des lampadaires.",
    "Les écoliers traversaient le canal gelé sur des planches.",
    "La pharmacienne chante dans une chorale de jazz.",
    "Les affiches du festival valent une petite fortune.",
    "Deux moulins sur quatre ont perdu leurs ailes pendant la tempête.",
    "Lise Morand sculpte des oiseaux dans du savon.",
    "Un étudiant en architecture a dessiné la passerelle.",
    "Le vent du nord apporte souvent la pluie.",
    "Une horloge sans aiguilles décore la façade de l'école.",
    "La fille du boulanger est devenue pilote de ligne.",
    "Tous les trois ans, la rivière déborde dans les jardins.",
    "La filature employait deux cents ouvrières avant la guerre.",
    "Plusieurs plaques de rue ont été volées.",
    "La banque offrait une tirelire à chaque élève.",
    "Un hérisson vit sous les marches de la mairie.",
    "La brocante se tient désormais le premier dimanche du mois.",
    "Les livreurs se plaignent des pavés glissants.",
    "L'ascenseur de la tour tombe régulièrement en panne.",
    "Deux cousins ont ouvert une librairie de voyage.",
    "L'ancienne carrière sert de terrain d'escalade.",
    "Madame Vasseur restaure des violons chez elle.",
    "La statue du général regarde vers la gare.",
    "Les soeurs du couvent vendaient du miel.",
    "La fanfare municipale cherche un trompettiste.",
    "La foudre a fendu le grand cèdre du parc.",
    "Un globe terrestre très usé trône dans la salle des fêtes.",
    "Un ancien facteur répare des bicyclettes sous le pont.",
    "Les platanes de l'avenue sont malades.",
    "On joue aux cartes tous les soirs au café du port.",
    "Le journal local paraissait sur du papier vert.",
    "Des touristes accrochent des cadenas à la grille.",
    "La liste d'attente pour les potagers est très longue.",
    "Un astronome amateur a installé son télescope dans le clocher.",
    "Le défilé passe toujours par la rue des Tanneurs.",
    "Des canards bloquent parfois la circulation au printemps.",
    "L'avocat garde un crocodile empaillé dans son bureau.",
    "On transportait autrefois le vin par bateau.",
    "Les gymnastes s'entraînent dans une ancienne gare.",
    "Un horloger suisse a créé la première boutique du quartier.",
)
_ITALIAN = (
    "La piscina rimane chiusa finché non riparano il tetto.",
    "Il signor Brandi alleva colombi viaggiatori da quando era bambino.",
    "Il cinema ha venduto le sue poltrone rosse agli abitanti.",
    "D'inverno la piazza profuma di castagne arrostite.",
    "Una chiatta carica di grano si incagliò vicino alla chiusa nel 1962.",
    "Il sindaco non ha ancora deciso la forma dei lampioni.",
    "Gli scolari attraversavano il canale gelato su delle assi.",
    "La farmacista canta in un coro jazz.",
    "I manifesti del festival valgono una piccola fortuna.",
    "Due mulini su quattro persero le pale durante la tempesta.",
    "Lisa Moretti scolpisce uccelli nel sapone.",
    "Uno studente di architettura ha disegnato la passerella.",
    "Il vento del nord porta spesso la pioggia.",
    "Un orologio senza lancette decora la facciata della scuola.",
    "La figlia del fornaio è diventata pilota di linea.",
    "Ogni tre anni il fiume straripa nei giardini.",
    "La filanda dava lavoro a duecento operaie prima della guerra.",
    "Diverse targhe delle vie sono state rubate.",
    "La banca regalava un salvadanaio a ogni alunno.",
    "Un riccio vive sotto i gradini del municipio.",
    "Il mercatino si tiene ormai la prima domenica del mese.",
    "I fattorini si lamentano del selciato scivoloso.",
    "L'ascensore della torre si guasta regolarmente.",
    "Due cugini hanno aperto una libreria di viaggi.",
    "L'antica cava serve da palestra di arrampicata.",
    "La signora Vannucci restaura violini in casa.",
    "La statua del generale guarda verso la stazione.",
    "Le suore del convento vendevano miele.",
    "La banda comunale cerca un trombettista.",
    "Un fulmine ha spaccato il grande cedro del parco.",
    "Un mappamondo molto consumato troneggia nella sala delle feste.",
    "Un ex postino ripara biciclette sotto il ponte.",
    "I platani del viale sono malati.",
    "Al caffè del porto si gioca a carte ogni sera.",
    "Il giornale locale usciva su carta verde.",
    "I turisti appendono lucchetti alla ringhiera.",
    "La lista d'attesa per gli orti è lunghissima.",
    "Un astronomo dilettante ha messo il telescopio nel campanile.",
    "La sfilata passa sempre per via dei Conciatori.",
    "In primavera le anatre bloccano a volte il traffico.",
    "L'avvocato tiene un coccodrillo impagliato nello studio.",
    "Un tempo il vino si trasportava in barca.",
    "I ginnasti si allenano in una vecchia stazione.",
    "Un orologiaio svizzero aprì la prima bottega del quartiere.",
)
_DUTCH = (
    "Het zwembad blijft dicht zolang het dak wordt hersteld.",
    "Meneer Brouwer houdt al sinds zijn jeugd postduiven.",
    "De bioscoop verkocht zijn rode stoelen aan de bewoners.",
    "In de winter ruikt het plein naar gepofte kastanjes.",
    "In 1962 liep een schuit vol graan vast bij de sluis.",
    "De burgemeester twijfelt nog over de vorm van de lantaarns.",
    "Schoolkinderen staken het bevroren kanaal over op planken.",
    "De apothekeres zingt in een jazzkoor.",
    "De affiches van het festival zijn een klein fortuin waard.",
    "Twee van de vier molens verloren hun wieken in de storm.",
    "Lies Maarse snijdt vogels uit zeep.",
    "Een student bouwkunde ontwierp de loopbrug.",
    "De noordenwind brengt vaak regen.",
    "Een klok zonder wijzers siert de gevel van de school.",
    "De dochter van de bakker werd piloot.",
    "Om de drie jaar stroomt de rivier over in de tuinen.",
    "In de spinnerij werkten voor de oorlog tweehonderd vrouwen.",
    "Verschillende straatnaamborden zijn gestolen.",
    "De bank gaf iedere leerling een spaarpot.",
    "Onder de trappen van het stadhuis woont een egel.",
    "De rommelmarkt is nu op de eerste zondag van de maand.",
    "Bezorgers klagen over de gladde keien.",
    "De lift van de toren gaat geregeld stuk.",
    "Twee neven openden een winkel met reisboeken.",
    "De oude groeve dient als klimwand.",
    "Mevrouw Vos herstelt thuis violen.",
    "Het standbeeld van de generaal kijkt naar het station.",
    "De zusters van het klooster verkochten honing.",
    "De harmonie zoekt een trompettist.",
    "De bliksem spleet de grote ceder in het park.",
    "In de feestzaal prijkt een versleten wereldbol.",
    "Een voormalige postbode maakt fietsen onder de brug.",
    "De platanen langs de laan zijn ziek.",
    "In het havencafé wordt elke avond gekaart.",
    "De plaatselijke krant verscheen op groen papier.",
    "Toeristen hangen slotjes aan het hek.",
    "De wachtlijst voor de moestuinen is erg lang.",
    "Een amateur zette zijn telescoop in de kerktoren.",
    "De optocht loopt altijd door de Looiersstraat.",
    "In het voorjaar houden eenden soms het verkeer op.",
    "De advocaat bewaart een opgezette krokodil op kantoor.",
    "Vroeger werd de wijn per boot vervoerd.",
    "De turners oefenen in een oud treinstation.",
    "Een Zwitserse horlogemaker begon de eerste zaak van de wijk.",
)
_FACTS: dict[Language, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "french": (
        ("Le dépôt des ordures est ouvert le mardi matin.", "Quand peut-on jeter ses déchets ?"),
        ("Il est interdit de se baigner dans le lac après vingt heures.", "A-t-on le droit de nager le soir ?"),
        ("Le bac ne circule plus depuis la construction du viaduc.", "Comment franchit-on le fleuve aujourd'hui ?"),
        ("Les chiens doivent être tenus en laisse dans la réserve.", "Quelles règles valent pour les animaux ?"),
        ("L'instituteur donne des cours gratuits de latin.", "Qui enseigne une langue ancienne ?"),
        ("Monsieur Carlier dirige l'hôpital.", "Il a grandi dans un cirque.", "Où le chef de la clinique vécut-il ?"),
        ("On peut louer une barque.", "Elle coûte six euros de l'heure.", "Combien paie-t-on pour un bateau ?"),
        ("Une digue longe la côte.", "Elle a cédé en 1978.", "La mer a-t-elle déjà percé la protection ?"),
    ),
    "italian": (
        ("Il deposito dei rifiuti apre il martedì mattina.", "Quando si può buttare la spazzatura?"),
        ("Nel lago è vietato fare il bagno dopo le otto di sera.", "È permesso nuotare la notte?"),
        ("Il traghetto non esiste più da quando c'è il viadotto.", "Come si attraversa oggi il fiume?"),
        ("Nella riserva i cani vanno tenuti al guinzaglio.", "Quali regole valgono per gli animali?"),
        ("Il maestro dà lezioni gratuite di latino.", "Chi insegna una lingua antica?"),
        ("Il signor Carli dirige l'ospedale.", "È cresciuto in un circo.", "Dove visse il capo della clinica?"),
        ("Si può noleggiare una barca.", "Costa sei euro all'ora.", "Quanto si paga per un giro sull'acqua?"),
        ("Un argine protegge la costa.", "Ha ceduto nel 1978.", "Il mare ha mai superato la protezione?"),
    ),
    "dutch": (
        ("De vuilstort is op dinsdagochtend open.", "Wanneer kan ik mijn afval wegbrengen?"),
        ("Na acht uur mag er niet in het meer worden gebaad.", "Is zwemmen in de avond toegestaan?"),
        ("Het veer vaart niet meer sinds het viaduct er is.", "Hoe steekt men tegenwoordig de rivier over?"),
        ("In het reservaat moeten honden aan de lijn.", "Welke regels gelden voor dieren?"),
        ("De meester geeft gratis lessen Latijn.", "Wie onderwijst een oude taal?"),
        ("Meneer Kramer leidt het ziekenhuis.", "Hij groeide op in een circus.", "Waar woonde de baas van de kliniek?"),
        ("Men kan een roeiboot huren.", "Die kost zes euro per uur.", "Hoeveel betaal je voor een schip?"),
        ("Een dijk beschermt de kust.", "In 1978 brak hij door.", "Is de waterkering ooit bezweken?"),
    ),
}
_OTHERS: dict[Language, tuple[str, ...]] = {"french": _FRENCH, "italian": _ITALIAN, "dutch": _DUTCH}


def development_documents() -> Iterator[RewordedDocument]:
    """Yield 24 documents: eight in each language, each with its fact somewhere else."""
    for language, facts in _FACTS.items():
        for number, (*fact, question) in enumerate(facts):
            drawn = random.Random(f"{language} {number}")
            sentences = drawn.sample(_OTHERS[language], _NUM_OTHERS)
            place = drawn.randrange(4, _NUM_OTHERS - 4)
            sentences[place:place] = fact
            paragraphs = [" ".join(sentences[start : start + 6]) for start in range(0, len(sentences), 6)]
            yield RewordedDocument(language, "\n\n".join(paragraphs), tuple(fact), question)
