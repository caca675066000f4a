"""What the language identifier knows: frequent words in order of frequency, and a little prose.

Both were written down for this project. The words are those that hold sentences together (articles,
prepositions, pronouns, auxiliaries, conjunctions), the most frequent first; the prose gives letter
sequences their rough frequencies. Keys are ISO 639-1 codes.
"""

WORDS = {
    "pt": """de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi
        ao ele das tem à seu sua ou ser quando muito há nos já está eu também só pelo pela até
        isso ela entre era depois sem mesmo aos ter seus quem nas me esse eles estão você tinha
        foram essa num nem suas meu às minha têm numa pelos elas havia seja qual será nós tenho
        lhe deles essas esses pelas este fosse dele tu te vocês vos lhes meus minhas teu tua nosso
        nossa dela esta estes estas aquele aquela isto aquilo estou estava fui são sido assim
        então onde ainda porque pois sobre após contra desde durante todo toda todos todas outro
        outra cada vez bem aqui ali lá agora sempre nunca nada tudo coisa dia ano anos fazer faz
        pode podem deve vai vou dizer disse diz segundo cerca apenas menos grande maior primeiro
        hoje ontem senhor tempo vida""",
    "en": """the of and to a in is that it was for on with as he be his by at from i not are this
        but had have you or which they an were her all she there been their has one will would
        what when who if so out up more no him into them can could my me than its time then some
        these your two our any other do now such only may after over also did upon should must
        very before about we us how where most like through made being those well down am first
        said man thou thy thee shall o' come let here good know make see go give take say sir lord
        ye hath doth o tis because while between under against during without within even still
        never too just every both own same few many much each why again once does doing having
        himself itself themselves cannot don't it's i'm isn't people year years way day new work
        back""",
    "es": """de la que el en y a los se del las un por con no una su para es al lo como más o pero
        sus le ha me si sin sobre este ya entre cuando todo esta ser son dos también fue había era
        muy años hasta desde está mi porque qué sólo han yo hay vez puede todos así nos ni parte
        tiene él uno donde bien tiempo mismo ese ahora cada vida otro después te otros aunque esa
        eso hace otra tan durante siempre día tanto ella tres sí dijo sido gran según menos año
        antes estado contra sino forma caso nada hacer estaba poco estos mayor ante unos les algo
        hacia ellos ayer hecho nosotros cual vosotros usted ustedes muchos quien quienes aquel
        aquella estas esos esas nuestro nuestra mucho mucha hoy aquí allí fueron sea eran pues
        cosa casa""",
    "fr": """de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce
        il sont la avec son ou aux mais comme cette ses ont été elle on si tout fait nous deux
        même ces leur être bien sans d'un peut sous entre après très où encore aussi avoir je y
        vous autres sa dont était contre temps ans toujours puis donc moins ils peu avait faut lui
        tous me mon ma mes te ton ta tes votre vos notre nos leurs cela ça rien quand alors depuis
        pendant avant chez vers jamais chaque quelque autre toute toutes cet eux moi toi soi
        nous-mêmes jour fois homme vie dit dire faire va sera serait c'est qu'il n'est j'ai l'on
        d'une s'est qu'on parce tant trop beaucoup ainsi car ni ici voici voilà avez avons suis es
        sommes""",
    "de": """der die und in den von zu das mit sich des auf für ist im dem nicht ein die eine als
        auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über
        einen so zum war haben nur oder aber vor zur bis mehr durch man sein wurde sei ich hatte
        kann gegen vom können schon wenn habe seine ihre dann unter wir soll ihr ihm uns ihn mich
        mir dich dir euch was wer wo hier da doch ja nein kein keine keinen immer wieder sehr viel
        alle alles jetzt diese dieser dieses diesem diesen jeder welche selbst ohne zwischen seit
        während weil damit also denn nun sondern müssen muss wollen will würde wäre waren sagte
        sagen macht gibt geht kommt zwei drei jahr jahre zeit mann frau leben welt tag ihnen ihren
        seinem""",
    "it": """di e che la il un a per è in una sono non con si da come le del più i ma nel alla dei
        gli lo ha anche della se al o delle ci questo dal su sua hanno essere dopo ancora suo fra
        dalla stato degli loro nella quando due prima ne quello tra era solo tutti poi così molto
        senza cosa quanto mentre ogni mi io ti tu lui lei noi voi mio mia tuo nostro nostra vostro
        sempre già ora qui dove chi cui quale quali perché però quindi dunque allora tutto tutta
        tutte altro altra altri altre stesso stessa questa questi queste quella quelli quelle fare
        fatto aveva ho hai abbiamo avete sia stata stati può deve disse detto anni anno giorno
        tempo vita uomo casa sul sulla sui nei nelle agli alle dai dalle allo nello dello bene
        poco mai niente""",
    "nl": """de het een van en in is dat op te zijn met voor niet die aan er om als ook door maar
        bij of uit naar nog dan ik hij ze zij we wij je jij u hun haar hem ons mij deze dit wat
        wie waar hoe al meer over tot tegen tussen onder na voor werd worden wordt heeft had
        hebben kan kunnen zou moet moeten wil geen wel zo nu hier daar toen omdat want alle andere
        veel jaar twee tijd mensen was waren ben bent zal zich eerste grote gaan doen maken zegt""",
    "ca": """de la el i que a en els les un una per és amb no del al es l' d' se com més va són o
        ha dels seu seva aquest aquesta però també hi ho era molt fins sobre entre quan tot tots
        sense després abans anys any li em et ens us jo tu ell ella nosaltres vosaltres ells elles
        què qui on perquè si ja encara sempre mai res aquí allà altres altre altra mateix cada dos
        ser estar haver fer pot han havia eren estat gran part dia temps vida pel pels als""",
}

PROSE = {
    "pt": """Naquela manhã o rio corria devagar e as crianças brincavam na margem, atirando
        pedrinhas à água. A avó dizia que a ponte velha não aguentaria outro inverno, mas ninguém
        lhe dava atenção. Quando chegou a chuva, os vizinhos juntaram-se para levar os móveis ao
        andar de cima, e a conversa durou até à noite. As informações que temos mostram uma
        relação direta entre a educação e a saúde da população; por isso, o governo propôs novas
        ações para melhorar as condições das escolas. Amanhã faremos o trabalho com calma:
        primeiro lemos o capítulo, depois escrevemos as questões e, finalmente, discutimos as
        soluções. Ele olhou para o velho, sorriu e disse que ainda havia muito que aprender.
        Ninguém conseguia explicar por que razão o coração batia tão depressa. Comprei pão, maçãs,
        feijão e um melão no mercado; o dinheiro não chegou para o queijo. O trem saiu cedo,
        levando consigo as malas e os sonhos daquela gente trabalhadora.""",
    "en": """That morning the river ran slowly and the children were playing on the bank, throwing
        small stones into the water. Their grandmother used to say that the old bridge would not
        last another winter, but nobody listened. When the rain came, the neighbours gathered to
        carry the furniture upstairs, and they kept talking until midnight. The information we
        have shows a strong relationship between education and public health, which is why the
        government proposed several new measures to improve the condition of schools. Tomorrow we
        should work through it quietly: first we read the chapter, then we write down our
        questions, and finally we discuss what everyone thought. He looked at the old man, smiled,
        and said there was still much to learn. Nobody could explain why his heart was beating so
        quickly. I bought bread, apples, beans and a melon at the market, though there was not
        enough money left for cheese. What light is this? We know nothing of your king, but we
        will fight.""",
    "es": """Aquella mañana el río corría despacio y los niños jugaban en la orilla, lanzando
        piedrecitas al agua. La abuela decía que el puente viejo no aguantaría otro invierno, pero
        nadie le hacía caso. Cuando llegó la lluvia, los vecinos se reunieron para subir los
        muebles al piso de arriba, y la conversación duró hasta la noche. La información que
        tenemos muestra una relación directa entre la educación y la salud de la población; por
        eso el gobierno propuso nuevas acciones para mejorar las condiciones de las escuelas.
        Mañana haremos el trabajo con calma: primero leemos el capítulo, luego escribimos las
        preguntas y finalmente discutimos las soluciones. Él miró al viejo, sonrió y dijo que
        todavía quedaba mucho por aprender. Nadie lograba explicar por qué el corazón le latía tan
        deprisa. Compré pan, manzanas, judías y un melón en el mercado; el dinero no alcanzó para
        el queso. ¿Quién llegó ayer?""",
    "fr": """Ce matin-là, la rivière coulait lentement et les enfants jouaient sur la rive en
        jetant de petits cailloux dans l'eau. La grand-mère disait que le vieux pont ne tiendrait
        pas un autre hiver, mais personne ne l'écoutait. Quand la pluie arriva, les voisins se
        réunirent pour monter les meubles à l'étage, et la conversation dura jusqu'à la nuit. Les
        informations dont nous disposons montrent un lien direct entre l'éducation et la santé de
        la population ; c'est pourquoi le gouvernement a proposé de nouvelles mesures pour
        améliorer les conditions des écoles. Demain nous ferons le travail calmement : d'abord
        nous lisons le chapitre, ensuite nous écrivons les questions, et finalement nous discutons
        des solutions. Il regarda le vieil homme, sourit et dit qu'il restait beaucoup à
        apprendre. Personne ne pouvait expliquer pourquoi son cœur battait si vite. J'ai acheté du
        pain, des pommes et du fromage.""",
    "de": """An jenem Morgen floss der Fluss langsam, und die Kinder spielten am Ufer und warfen
        kleine Steine ins Wasser. Die Großmutter sagte immer, dass die alte Brücke keinen weiteren
        Winter überstehen würde, aber niemand hörte ihr zu. Als der Regen kam, trafen sich die
        Nachbarn, um die Möbel nach oben zu tragen, und das Gespräch dauerte bis in die Nacht. Die
        Auskünfte, die wir haben, zeigen einen deutlichen Zusammenhang zwischen Bildung und
        Gesundheit der Bevölkerung; deshalb schlug die Regierung neue Maßnahmen vor, um die
        Verhältnisse an den Schulen zu verbessern. Morgen machen wir die Arbeit in Ruhe: Zuerst
        lesen wir das Kapitel, dann schreiben wir die Fragen auf, und schließlich besprechen wir
        die Lösungen. Er sah den alten Mann an, lächelte und sagte, es gebe noch viel zu lernen.
        Niemand konnte erklären, warum sein Herz so schnell schlug. Ich kaufte Brot, Äpfel, Bohnen
        und Käse auf dem Markt.""",
    "it": """Quella mattina il fiume scorreva lentamente e i bambini giocavano sulla riva,
        gettando sassolini nell'acqua. La nonna diceva che il vecchio ponte non avrebbe retto un
        altro inverno, ma nessuno le dava retta. Quando arrivò la pioggia, i vicini si riunirono
        per portare i mobili al piano di sopra, e la conversazione durò fino a notte. Le
        informazioni che abbiamo mostrano un legame diretto tra l'istruzione e la salute della
        popolazione; per questo il governo ha proposto nuove misure per migliorare le condizioni
        delle scuole. Domani faremo il lavoro con calma: prima leggiamo il capitolo, poi scriviamo
        le domande e infine discutiamo le soluzioni. Egli guardò il vecchio, sorrise e disse che
        c'era ancora molto da imparare. Nessuno riusciva a spiegare perché il cuore gli battesse
        così in fretta. Ho comprato pane, mele, fagioli e un melone al mercato; i soldi non
        bastarono per il formaggio.""",
    "nl": """Die ochtend stroomde de rivier langzaam en de kinderen speelden aan de oever en
        gooiden kleine steentjes in het water. Grootmoeder zei altijd dat de oude brug geen winter
        meer zou halen, maar niemand luisterde naar haar. Toen de regen kwam, verzamelden de buren
        zich om de meubels naar boven te dragen, en het gesprek duurde tot in de nacht. De
        gegevens die wij hebben laten een duidelijk verband zien tussen het onderwijs en de
        gezondheid van de bevolking; daarom heeft de regering nieuwe maatregelen voorgesteld.
        Morgen doen we het werk rustig: eerst lezen we het hoofdstuk, dan schrijven we de vragen
        op. Hij keek de oude man aan, glimlachte en zei dat er nog veel te leren viel. Ik kocht
        brood, appels en kaas.""",
    "ca": """Aquell matí el riu corria a poc a poc i els nens jugaven a la vora, llançant pedretes
        a l'aigua. L'àvia deia que el pont vell no aguantaria un altre hivern, però ningú no li
        feia cas. Quan va arribar la pluja, els veïns es van reunir per pujar els mobles al pis de
        dalt, i la conversa va durar fins a la nit. La informació que tenim mostra una relació
        directa entre l'educació i la salut de la població; per això el govern va proposar noves
        accions per millorar les condicions de les escoles. Demà farem la feina amb calma: primer
        llegim el capítol, després escrivim les preguntes. Ningú no podia explicar per què el cor
        li bategava tan de pressa. Vaig comprar pa, pomes, mongetes i formatge al mercat; els
        diners no van arribar per al meló.""",
}

# scripts that (nearly) one language alone uses, as code point ranges
SCRIPTS = {
    "el": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "he": ((0x590, 0x5FF),),
    "th": ((0xE00, 0xE7F),),
    "ko": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7A3)),
    "ja": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "zh": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x3FFFF)),
}
